// Contributions to payload and next residual, for one codec: GRADCOMP_CLASS.
//
// Buckets of up to 8192 elements, two chunks, whose codes begin with a byte go through one kernel, a team of
// threads each. All others go through two: ranges, which leaves a codec per bucket, and codes. With
// GRADCOMP_TEAM > 16 there is only ranges, a block per bucket.

#include "native/body/block_float.hpp"
#include "native/body/codebook.hpp"
#include "native/body/signs.hpp"

#include "philox.cuh"
#include "sources.cuh"

using namespace gradcomp;
using namespace gradcomp::cuda;

namespace gradcomp::cuda {

using Class = GRADCOMP_CLASS;

struct EncodeParams {
    std::uint64_t rows, places;  // see Place
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
    std::int64_t row;
    const Segment& segment;  // in global memory: a copy would take registers
    std::int64_t bucket, begin, elements;
    std::uint8_t *payload, *codes;  // of the row
    bool any;

    explicit Job(const EncodeParams& params) : Job(params, Place(params.places)) {}

    Job(const EncodeParams& params, const Place& place)
        : row(place.row), segment(at<Segment>(params.rows)[place.row]) {
        const Payload<Class> layout(segment);
        bucket = place.tile * teams + threadIdx.x / team_threads;
        any = bucket < layout.buckets;
        begin = bucket * layout.bucket_size;
        elements = smaller(layout.bucket_size, segment.length - begin);
        payload = to<std::uint8_t>(params.payload) + segment.payload;
        codes = payload + layout.scale_bytes;
    }

    // By one thread: the record of the bucket, and whether it is sound.
    void write(const EncodeParams& params, const Class& codec) const {
        if (!codec.representable()) to<std::uint8_t>(params.bad)[row] = 1;
        codec.write(payload + bucket * Class::record_bytes);
    }
};

inline Stream stream_of(const EncodeParams& params) {
    return {params.seed, static_cast<std::uint32_t>(params.step), static_cast<std::uint32_t>(params.rank)};
}

// --- buckets of whole groups: half a warp for each, strip by strip ---

// Strips that a thread holds at once: all of a bucket of 512 elements, which is read once.
inline constexpr int strips = 4;
inline constexpr int held = strips * strip;
static_assert(chunk_elements % held == 0);

using Held = float[strips][8];

// Add elements of a bucket, of which `left` are held.
inline void add_held(typename Class::Range& range, const Held& c, int left) {
    if constexpr (order_free<typename Class::Range>) {
        if (left >= held) {
#pragma unroll
            for (int k = 0; k < strips; ++k)
#pragma unroll
                for (int i = 0; i < 8; ++i) range.add({c[k][i]});
            return;
        }
#pragma unroll
        for (int k = 0; k < strips; ++k) {
            const int count = count_of(left - k * strip - place_in_strip());
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (i < count) range.add({c[k][i]});
        }
    } else {
        // To the lanes by way of shared memory, where the two strips of a warp lie in different banks.
        alignas(16) __shared__ float of_teams[teams][strip + 16];
        float* const own = of_teams[threadIdx.x / team_threads];
#pragma unroll
        for (int k = 0; k < strips; ++k) {
            const int count = left - k * strip;
            if (count <= 0) continue;
            __syncwarp(half_warp_mask());  // of the strip before
            auto* const vectors = reinterpret_cast<float4*>(own + place_in_strip());
            vectors[0] = make_float4(c[k][0], c[k][1], c[k][2], c[k][3]);
            vectors[1] = make_float4(c[k][4], c[k][5], c[k][6], c[k][7]);
            __syncwarp(half_warp_mask());
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (16 * i + team_rank() < count) range.add({own[16 * i + team_rank()]});
        }
    }
}

// `whole`: everything that is held exists.
template <bool stochastic, bool whole>
inline void encode_held(const EncodeParams& params, const Job& job, std::int64_t begin, int left,
                        const Held& c, const Class& codec) {
    const Segment& segment = job.segment;
    const Stream stream = stream_of(params);
    const std::int64_t first = begin + place_in_strip();
    std::uint8_t* const codes = job.codes + place_of_codes<typename Class::Code>(first, segment.bits);
    float* const next_residual = to<float>(segment.next_residual) + begin;
#pragma unroll
    for (int k = 0; k < strips; ++k) {
        if (!whole && left <= k * strip) continue;
        float u[8] = {};
        if constexpr (stochastic) draw(stream, segment.layer, segment.start + first + k * strip, u);
        I32 code[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) code[i] = codec.template code<stochastic>({c[k][i]}, {u[i]});
        const int count = whole ? static_cast<int>(group) : count_of(left - k * strip - place_in_strip());
        write_codes<typename Class::Code>(
            codes + place_of_codes<typename Class::Code>(k * strip, segment.bits), count, segment.bits, code);
        if (segment.next_residual == 0) continue;
        float lost[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) lost[i] = (F32{c[k][i]} - codec.value(code[i])).v;
        write_strip(next_residual + k * strip, whole ? strip : left - k * strip, lost);
    }
}

template <bool stochastic, class Source>
inline void encode_buckets(const EncodeParams& params) {
    const Job job(params);
    if (!job.any) return;
    const Source source(params, job.segment);
    Held c;
    typename Class::Range range;
    const auto elements = static_cast<int>(job.elements);
    const bool several = elements > chunk_elements;
    ChunkPairs trees;
    for (int done = 0; done < elements; done += held) {
        source.read_strips(job.bucket, job.begin + done, elements - done, c);
        add_held(range, c, elements - done);
        const int end = done + held;
        if (several && (end % chunk_elements == 0 || end >= elements)) range.end_chunk(trees);
    }
    if (several) range.join(trees);
    const Class codec(range, Level(job.segment, at<float>(params.magnitudes)), job.elements);
    if (team_rank() == 0) job.write(params, codec);
    for (int done = 0; done < elements; done += held) {
        if (elements > held) source.read_strips(job.bucket, job.begin + done, elements - done, c);
        if (elements - done >= held)
            encode_held<stochastic, true>(params, job, job.begin + done, held, c, codec);
        else
            encode_held<stochastic, false>(params, job, job.begin + done, elements - done, c, codec);
    }
}

// --- buckets of any size ---

// Add the elements begin..end of a row, at most a chunk, by half a warp. Its threads read a strip, of which
// each takes every sixteenth element by way of shared memory; the next strip is on its way meanwhile.
template <class Source>
inline void add_chunk(typename Class::Range& range, const Source& source, std::int64_t begin,
                      std::int64_t end, std::int64_t length) {
    __shared__ float strips_of_block[team_threads / 16][strip + 16];
    float* const own = strips_of_block[team_rank() / 16];
    const int lane = team_rank() % 16;
    const std::int64_t origin = begin / 8 * 8;  // where groups begin that a source can read
    const auto skipped = static_cast<int>(begin - origin);
    float c[8] = {};
    const auto fetch = [&](std::int64_t first) {
        const std::int64_t place = first + 8 * lane;
        if (place < end) source.read(place, smaller(group, length - place), c);
    };
    fetch(origin);
    for (std::int64_t first = origin; first < end; first += strip) {
        __syncwarp(half_warp_mask());  // of the strip before
#pragma unroll
        for (int i = 0; i < 8; ++i) own[8 * lane + i] = c[i];
        __syncwarp(half_warp_mask());
        fetch(first + strip);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const int i = (lane + skipped) % 16 + 16 * k;
            if (first + i >= begin && first + i < end) range.add({own[i]});
        }
    }
}

template <class Source>
inline Class::Range range_of(const Source& source, const Job& job) {
    typename Class::Range range;
    const std::int64_t begin = job.begin, end = begin + job.elements, length = job.segment.length;
    const std::int64_t origin = begin / 8 * 8 + 8 * team_rank();
    if constexpr (order_free<typename Class::Range>) {
        for (std::int64_t first = origin; first < end; first += 8 * team_threads) {
            float c[8];
            source.read(first, smaller(group, length - first), c);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (first + i >= begin && first + i < end) range.add({c[i]});
        }
    } else if constexpr (team_threads == 16) {
        add_elements<ChunkPairs>(range, source, job.bucket, begin, end);
    } else {
        constexpr std::int64_t round = team_threads / 16 * chunk_elements;
        ChunkTrees trees;
        for (std::int64_t first = begin; first < end; first += round) {
            const std::int64_t chunk = smaller(first + team_rank() / 16 * chunk_elements, end);
            add_chunk(range, source, chunk, smaller(chunk + chunk_elements, end), length);
            range.end_chunk(trees);
        }
        range.join(trees);
    }
    return range;
}

template <class Source>
inline void find_ranges(const EncodeParams& params) {
    const Job job(params);
    if (!job.any) return;
    const Source source(params, job.segment);
    const Class codec(range_of(source, job), Level(job.segment, at<float>(params.magnitudes)), job.elements);
    if (team_rank() != 0) return;
    job.write(params, codec);
    to<Class>(params.codecs)[at<std::int64_t>(params.codec_begins)[job.row] + job.bucket] = codec;
}

// Eight codes per thread, of as many buckets as they happen to belong to.
template <bool stochastic, class Source>
inline void encode_codes(const EncodeParams& params) {
    const Place place(params.places);
    const Segment segment = at<Segment>(params.rows)[place.row];
    const std::int64_t first = 8 * (place.tile * 256 + threadIdx.x);
    if (first >= segment.length) return;
    const std::int64_t count = smaller(group, segment.length - first);
    const Source source(params, segment);
    float c[8];
    source.read(first, count, c);
    const Payload<Class> layout(segment);
    float u[8] = {};
    if constexpr (stochastic) draw(stream_of(params), segment.layer, segment.start + first, u);
    const std::int64_t bucket = first / layout.bucket_size;
    const Class* next = at<Class>(params.codecs) + at<std::int64_t>(params.codec_begins)[place.row] + bucket;
    Class codec = *next;
    std::int64_t end = (bucket + 1) * layout.bucket_size;
    I32 code[8];
    float lost[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        code[i] = splat(0);
        lost[i] = 0.0f;
        if (i >= count) continue;
        if (first + i == end) {
            codec = *++next;
            end += layout.bucket_size;
        }
        code[i] = codec.template code<stochastic>({c[i]}, {u[i]});
        lost[i] = (F32{c[i]} - codec.value(code[i])).v;
    }
    using Code = Class::Code;
    std::uint8_t* const codes = to<std::uint8_t>(params.payload) + segment.payload + layout.scale_bytes;
    write_codes<Code>(codes + place_of_codes<Code>(first, segment.bits), static_cast<int>(count),
                      segment.bits, code);
    if (segment.next_residual != 0) write_floats(to<float>(segment.next_residual) + first, count, lost);
}

}  // namespace gradcomp::cuda

// Two blocks share a processor's registers, 128 for a thread, or three where 80 are enough: one loads while
// others compute.
template <class Codec>
inline constexpr int nearest_blocks = 2;
template <>
inline constexpr int nearest_blocks<MinMax> = 3;

// The families of this source; modules.py lists which of them are compiled, and for what.
#define ENCODE_NEAREST 1
#define ENCODE_STOCHASTIC 2
#define REDUCE_NEAREST 3
#define REDUCE_STOCHASTIC 4
#define CODES_NEAREST 5
#define CODES_STOCHASTIC 6
#define RANGES 7

#if GRADCOMP_TEAM == 16

#if IN_MODULE(ENCODE_NEAREST)
KERNEL(256, nearest_blocks<Class>) encode_nearest(const EncodeParams __grid_constant__ params) {
    encode_buckets<false, FromGradient>(params);
}
#endif

#if IN_MODULE(ENCODE_STOCHASTIC)
KERNEL(256, 2) encode_stochastic(const EncodeParams __grid_constant__ params) {
    encode_buckets<Class::draws, FromGradient>(params);
}
#endif

#if IN_MODULE(REDUCE_NEAREST)
KERNEL(256, 2) reduce_nearest(const EncodeParams __grid_constant__ params) {
    encode_buckets<false, FromPayloads<Class>>(params);
}
#endif

#if IN_MODULE(REDUCE_STOCHASTIC)
KERNEL(256, 2) reduce_stochastic(const EncodeParams __grid_constant__ params) {
    encode_buckets<Class::draws, FromPayloads<Class>>(params);
}
#endif

#if IN_MODULE(CODES_NEAREST)
KERNEL(256, 2) encode_codes_nearest(const EncodeParams __grid_constant__ params) {
    encode_codes<false, FromGradient>(params);
}
KERNEL(256, 2) reduce_codes_nearest(const EncodeParams __grid_constant__ params) {
    encode_codes<false, FromPayloads<Class>>(params);
}
#endif

#if IN_MODULE(CODES_STOCHASTIC)
KERNEL(256, 2) encode_codes_stochastic(const EncodeParams __grid_constant__ params) {
    encode_codes<Class::draws, FromGradient>(params);
}
KERNEL(256, 2) reduce_codes_stochastic(const EncodeParams __grid_constant__ params) {
    encode_codes<Class::draws, FromPayloads<Class>>(params);
}
#endif

#endif

#if IN_MODULE(RANGES)
KERNEL(256, 2) encode_ranges(const EncodeParams __grid_constant__ params) {
    find_ranges<FromGradient>(params);
}
KERNEL(256, 2) reduce_ranges(const EncodeParams __grid_constant__ params) {
    find_ranges<FromPayloads<Class>>(params);
}
#endif
