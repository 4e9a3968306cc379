// Contributions to payload and shadow, for one codec: GRADCOMP_CLASS.
//
// Buckets of up to 8192 elements whose codes begin with a byte go through one kernel, a team of threads each.
// All others go through two: ranges, which leaves a codec per bucket, and codes. With GRADCOMP_TEAM > 16
// there is only ranges, a block per bucket.

#include "native/body/codebook.hpp"
#include "native/body/signs.hpp"

#include "philox.cuh"
#include "sources.cuh"

using namespace gradcomp;
using namespace gradcomp::cuda;

namespace gradcomp::cuda {

using Class = GRADCOMP_CLASS;

struct EncodeParams {
    std::uint64_t rows, tiles;
    std::int64_t row_count;
    std::uint64_t payload;       // written
    std::uint64_t bad;           // a byte per row: something is not finite
    std::uint64_t codecs;        // of all buckets; ranges writes them, codes reads them
    std::uint64_t codec_begins;  // number of the first bucket of each row
    std::uint64_t payloads;      // addresses, of reduce
    std::int64_t payload_count;
    std::uint64_t magnitudes;
    std::uint64_t seed;
    std::int64_t step, rank;
    double scale, decay, divisor;
};

// Whether a range comes out the same in whatever order elements are added.
template <class Range>
inline constexpr bool order_free = false;
template <>
inline constexpr bool order_free<MinMax::Range> = true;
template <>
inline constexpr bool order_free<LInfNorm> = true;
template <>
inline constexpr bool order_free<Presence> = true;

inline constexpr int teams = 256 / team_threads;

// What codec.py makes room for.
static_assert(sizeof(Class) <= 64);

// A bucket of a row, and who works on it.
struct Job {
    Segment segment;
    std::int64_t row, bucket, begin, end;
    bool any;

    explicit Job(const EncodeParams& params) {
        const auto* tiles = at<std::int64_t>(params.tiles);
        row = row_of(tiles, params.row_count, blockIdx.x);
        segment = at<Segment>(params.rows)[row];
        const Payload<Class> layout(segment);
        bucket = (blockIdx.x - tiles[row]) * teams + threadIdx.x / team_threads;
        any = bucket < layout.buckets;
        begin = bucket * layout.bucket_size;
        end = smaller(begin + layout.bucket_size, segment.length);
    }
};

template <class Source>
inline Class::Range range_of(const Source& source, const Segment& segment, std::int64_t begin,
                             std::int64_t end) {
    typename Class::Range range;
    if constexpr (order_free<typename Class::Range>) {
        for (std::int64_t first = begin / 8 * 8 + 8 * team_rank(); first < end; first += 8 * team_threads) {
            float c[8];
            source.read(first, smaller(group, segment.length - first), c);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (first + i >= begin && first + i < end) range.add({c[i]});
        }
    } else if (team_rank() < 16) {
        for (std::int64_t i = begin + team_rank(); i < end; i += 16) range.add({source.one(i)});
    }
    return range;
}

template <bool stochastic>
inline void encode_group(const EncodeParams& params, const Segment& segment, std::int64_t first,
                         std::int64_t count, const float (&c)[8], const Class (&codecs)[1]) {
    const Class& codec = codecs[0];
    float u[8] = {};
    const Stream stream{params.seed, static_cast<std::uint32_t>(params.step),
                        static_cast<std::uint32_t>(params.rank)};
    if constexpr (stochastic) draw(stream, segment.layer, segment.start + first, u);
    I32 code[8];
    float lost[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        code[i] = codec.template code<stochastic>({c[i]}, {u[i]});
        lost[i] = (F32{c[i]} - codec.value(code[i])).v;
    }
    auto* const codes = const_cast<std::uint8_t*>(at<std::uint8_t>(params.payload)) + segment.payload +
                        Payload<Class>(segment).scale_bytes;
    write_codes<typename Class::Code>(codes, first, count, segment.bits, code);
    if (segment.shadow != 0) write_floats(reinterpret_cast<float*>(segment.shadow) + first, count, lost);
}

template <bool stochastic, class Source>
inline void encode_buckets(const EncodeParams& params) {
    const Job job(params);
    if (!job.any) return;
    const Segment& segment = job.segment;
    const Source source(params, segment);
    const Level level(segment, at<float>(params.magnitudes));
    const std::int64_t elements = job.end - job.begin;

    // Small buckets stay in registers between the two passes.
    constexpr int kept = 4;
    constexpr bool keeps = order_free<typename Class::Range>;
    const bool small = keeps && elements <= kept * 8 * team_threads;
    float c[kept][8];
    typename Class::Range range;
    if (small) {
#pragma unroll
        for (int k = 0; k < kept; ++k) {
            const std::int64_t first = 8 * (team_rank() + k * team_threads);
            if (first >= elements) continue;
            const std::int64_t count = smaller(group, elements - first);
            source.read(job.begin + first, count, c[k]);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (i < count) range.add({c[k][i]});
        }
    } else {
        range = range_of(source, segment, job.begin, job.end);
    }

    const Class codec[1] = {Class(range, level, elements)};
    if (team_rank() == 0) {
        if (!codec[0].representable()) const_cast<std::uint8_t*>(at<std::uint8_t>(params.bad))[job.row] = 1;
        codec[0].write(const_cast<std::uint8_t*>(at<std::uint8_t>(params.payload)) + segment.payload +
                       job.bucket * Class::record_bytes);
    }

    if (small) {
#pragma unroll
        for (int k = 0; k < kept; ++k) {
            const std::int64_t first = 8 * (team_rank() + k * team_threads);
            if (first < elements)
                encode_group<stochastic>(params, segment, job.begin + first, smaller(group, elements - first),
                                         c[k], codec);
        }
        return;
    }
    for (std::int64_t first = job.begin + 8 * team_rank(); first < job.end; first += 8 * team_threads) {
        const std::int64_t count = smaller(group, job.end - first);
        source.read(first, count, c[0]);
        encode_group<stochastic>(params, segment, first, count, c[0], codec);
    }
}

template <class Source>
inline void find_ranges(const EncodeParams& params) {
    const Job job(params);
    if (!job.any) return;
    const Source source(params, job.segment);
    const typename Class::Range range = range_of(source, job.segment, job.begin, job.end);
    const Class codec(range, Level(job.segment, at<float>(params.magnitudes)), job.end - job.begin);
    if (team_rank() != 0) return;
    if (!codec.representable()) const_cast<std::uint8_t*>(at<std::uint8_t>(params.bad))[job.row] = 1;
    codec.write(const_cast<std::uint8_t*>(at<std::uint8_t>(params.payload)) + job.segment.payload +
                job.bucket * Class::record_bytes);
    const std::int64_t number = at<std::int64_t>(params.codec_begins)[job.row] + job.bucket;
    const_cast<Class*>(at<Class>(params.codecs))[number] = codec;
}

// Eight codes per thread, of as many buckets as they happen to belong to.
template <bool stochastic, class Source>
inline void encode_codes(const EncodeParams& params) {
    const auto* tiles = at<std::int64_t>(params.tiles);
    const std::int64_t row = row_of(tiles, params.row_count, blockIdx.x);
    const Segment segment = at<Segment>(params.rows)[row];
    const std::int64_t first = 8 * ((blockIdx.x - tiles[row]) * 256 + threadIdx.x);
    if (first >= segment.length) return;
    const std::int64_t count = smaller(group, segment.length - first);
    const Source source(params, segment);
    float c[8];
    source.read(first, count, c);
    const Payload<Class> layout(segment);
    const Class* const codecs = at<Class>(params.codecs) + at<std::int64_t>(params.codec_begins)[row];
    const Stream stream{params.seed, static_cast<std::uint32_t>(params.step),
                        static_cast<std::uint32_t>(params.rank)};
    float u[8] = {};
    if constexpr (stochastic) draw(stream, segment.layer, segment.start + first, u);
    I32 code[8];
    float lost[8];
    for (int i = 0; i < 8; ++i) {
        code[i] = splat(0);
        lost[i] = 0.0f;
        if (i >= count) continue;
        const Class codec = codecs[(first + i) / layout.bucket_size];
        code[i] = codec.template code<stochastic>({c[i]}, {u[i]});
        lost[i] = (F32{c[i]} - codec.value(code[i])).v;
    }
    auto* const codes = const_cast<std::uint8_t*>(at<std::uint8_t>(params.payload)) + segment.payload;
    write_codes<typename Class::Code>(codes + layout.scale_bytes, first, count, segment.bits, code);
    if (segment.shadow != 0) write_floats(reinterpret_cast<float*>(segment.shadow) + first, count, lost);
}

}  // namespace gradcomp::cuda

#if GRADCOMP_TEAM == 16

KERNEL(256) encode_nearest(const EncodeParams* params) {
    encode_buckets<false, FromGradient>(*params);
}
KERNEL(256) reduce_nearest(const EncodeParams* params) {
    encode_buckets<false, FromPayloads<Class>>(*params);
}
KERNEL(256) encode_codes_nearest(const EncodeParams* params) {
    encode_codes<false, FromGradient>(*params);
}
KERNEL(256) reduce_codes_nearest(const EncodeParams* params) {
    encode_codes<false, FromPayloads<Class>>(*params);
}
KERNEL(256) encode_stochastic(const EncodeParams* params) {
    encode_buckets<Class::draws, FromGradient>(*params);
}
KERNEL(256) reduce_stochastic(const EncodeParams* params) {
    encode_buckets<Class::draws, FromPayloads<Class>>(*params);
}
KERNEL(256) encode_codes_stochastic(const EncodeParams* params) {
    encode_codes<Class::draws, FromGradient>(*params);
}
KERNEL(256) reduce_codes_stochastic(const EncodeParams* params) {
    encode_codes<Class::draws, FromPayloads<Class>>(*params);
}

#endif

KERNEL(256) encode_ranges(const EncodeParams* params) {
    find_ranges<FromGradient>(*params);
}
KERNEL(256) reduce_ranges(const EncodeParams* params) {
    find_ranges<FromPayloads<Class>>(*params);
}
