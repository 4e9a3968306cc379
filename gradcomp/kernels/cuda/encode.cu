// Contributions to payload and next residual, for one codec: GRADCOMP_CLASS.
//
// Buckets of up to 8192 elements, two chunks, whose codes begin with a byte go through one kernel, a team of
// threads each. Of all others ranges.cu leaves a codec per bucket, and a second kernel here writes codes.
//
// A block goes through tiles, as far apart as there are blocks. While it works on one, the next one's place
// is on its way, and then its data, to the cache that all processors share.

#include "encode.cuh"

using namespace gradcomp;
using namespace gradcomp::cuda;

namespace gradcomp::cuda {

// --- buckets of whole groups: a team for each ---

// Add what is staged of a bucket, of which so many elements are left.
inline void add_staged(typename Class::Range& range, const Stage& stage, int left) {
    if constexpr (order_free<typename Class::Range>) {
        const int end = left < held ? left : held;
#pragma unroll 1
        for (int begin = 0; begin < end; begin += strip) {
            float c[8];
            stage.read(begin, c);
            const int count = count_of(end - begin - group * team_rank());
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (i < count) range.add({c[i]});
        }
    } else {
#pragma unroll 4
        for (int begin = 0; begin < held; begin += 32) {
            float first, second;
            stage.read_pair(begin, first, second);
            if (begin + team_rank() < left) range.add({first});
            if (begin + 16 + team_rank() < left) range.add({second});
        }
    }
}

// Codecs that leave no registers to what the counters of a layer have in common: it is worked out anew.
template <class Codec>
inline constexpr bool looks_up = false;
template <class Norm>
inline constexpr bool looks_up<Codebook<Norm, LargeTable>> = true;

// Write the codes of staged elements; their errors replace the elements if a next residual needs them.
template <bool stochastic>
inline void encode_staged(const EncodeParams& params, const Job& job, std::int64_t begin, int end,
                          const Stage& stage, const Class& codec) {
    using Code = Class::Code;
    // Once, not after every store that might have changed them.
    const int bits = job.segment.bits;
    std::uint32_t layer = job.segment.layer;
    const bool residual = job.segment.next_residual != 0;
    const int own = group * team_rank();
    const std::int64_t start = job.segment.start + begin + own;
    std::uint8_t* const codes =
        job.payload(params) + job.layout.scale_bytes + place_of_codes<Code>(begin + own, bits);
#pragma unroll 1
    for (int first = 0; first < end; first += strip) {
        float c[8], u[8] = {};
        stage.read(first, c);
        if constexpr (stochastic) {
            if constexpr (looks_up<Class>) here(layer);
            draw(Counters(stream_of(params), layer), start + first, u);
        }
        I32 code[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) code[i] = codec.template code<stochastic>({c[i]}, {u[i]});
        write_codes<Code>(codes + place_of_codes<Code>(first, bits), count_of(end - first - own), bits, code);
        if (!residual) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) c[i] = (F32{c[i]} - codec.value(code[i])).v;
        stage.write(first, c);
    }
}

// `whole`: for both teams of the warp, all of it exists.
inline void write_staged(float* p, int end, bool whole, const Stage& stage) {
    if (whole && aligned(p, 16)) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < vectors_of_stage; ++i)
            __stcs(reinterpret_cast<float4*>(p) + place_of_vector(i), *stage.vector(i));
        return;
    }
    p += group * team_rank();
#pragma unroll 1
    for (int first = 0; first < end; first += strip) {
        float x[8];
        stage.read(first, x);
        write_floats(p + first, count_of(end - first - group * team_rank()), x);
    }
}

// Elements of a bucket from `done` on, to where the team reads them.
template <class Source>
inline void fill(const Source& source, const Job& job, int done, const Stage& stage) {
    const int left = static_cast<int>(job.elements) - done;
    // A team without a bucket reads its neighbour's record, which exists.
    const std::int64_t bucket = job.elements > 0 ? job.bucket : job.bucket - 1;
    __syncwarp();  // of what was there before
    source.stage(bucket, job.begin + done, left, job.least - done >= held, stage);
    __syncwarp();
}

template <class Source>
inline Class find_codec(const EncodeParams& params, const Job& job, const Stage& stage) {
    const Source source(params, job.segment);
    typename Class::Range range;
    const auto elements = static_cast<int>(job.elements), most = static_cast<int>(job.most);
    const bool several = most > chunk_elements;
    ChunkPairs trees;
    for (int done = 0; done < most; done += held) {
        fill(source, job, done, stage);
        add_staged(range, stage, elements - done);
        const int end = done + held;
        if (several && (end % chunk_elements == 0 || end >= most)) range.end_chunk(trees);
    }
    if (several) range.join(trees);
    const Class codec(range, job.level(params), elements);
    job.write(params, codec);
    return codec;
}

template <bool stochastic, class Source>
inline void encode_tile(const EncodeParams& params, const Place& place, const Place& next, bool more,
                        const Stage& stage) {
    const Job job(params, place);
    if (job.most > 0) {
        const Class codec = find_codec<Source>(params, job, stage);
        if (more) {
            const Job ahead(params, next);
            const auto count = static_cast<int>(smaller(ahead.elements, held));
            Source(params, ahead.segment)
                .fetch_ahead(ahead.bucket, ahead.begin, count, team_rank(), team_threads);
        }
        const Job same(params, place.again());
        const auto elements = static_cast<int>(same.elements), most = static_cast<int>(same.most);
        for (int done = 0; done < most; done += held) {
            if (most > held) fill(Source(params, same.segment), same, done, stage);
            const int end = elements - done < held ? elements - done : held;
            encode_staged<stochastic>(params, same, same.begin + done, end, stage, codec);
            if (same.segment.next_residual != 0)
                write_staged(to<float>(same.segment.next_residual) + same.begin + done, end,
                             same.least - done >= held, stage);
        }
    }
}

template <bool stochastic, class Source>
inline void encode_buckets(const EncodeParams& params) {
    __shared__ float4 staged[teams][held / 4];
    const Stage stage(staged[threadIdx.x / team_threads]);
    for_tiles(params, [&](const Place& place, const Place& next, bool more) {
        encode_tile<stochastic, Source>(params, place, next, more, stage);
    });
}

// --- codes of buckets of any size ---

// Eight codes per thread, of as many buckets as they happen to belong to.
template <bool stochastic, class Source>
inline void encode_codes_of_tile(const EncodeParams& params, const Place& place) {
    const Segment segment = at<Segment>(params.rows)[place.row];
    const std::int64_t first = 8 * (std::int64_t{place.tile} * 256 + threadIdx.x);
    if (first >= segment.length) return;
    const std::int64_t count = smaller(group, segment.length - first);
    const Source source(params, segment);
    float c[8];
    source.read(first, count, c);
    const Payload<Class> layout(segment);
    float u[8] = {};
    if constexpr (stochastic) draw(Counters(stream_of(params), segment.layer), segment.start + first, u);
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

template <bool stochastic, class Source>
inline void encode_codes(const EncodeParams& params) {
    constexpr std::int64_t tile_elements = 256 * group;
    for_tiles(params, [&](const Place& place, const Place& next, bool more) {
        if (more) {
            const Segment& segment = at<Segment>(params.rows)[next.row];
            const std::int64_t first = next.tile * tile_elements;
            const auto count = static_cast<int>(smaller(tile_elements, segment.length - first));
            const std::int64_t bucket = first / Payload<Class>(segment).bucket_size;
            Source(params, segment).fetch_ahead(bucket, first, count, static_cast<int>(threadIdx.x), 256);
        }
        encode_codes_of_tile<stochastic, Source>(params, place);
    });
}

}  // namespace gradcomp::cuda

// Three blocks share a processor's registers, 80 for a thread: one loads while others compute. Two, with 128,
// reduce where a bucket is summed in order, or a table is looked into: that takes what payloads need.
template <class Codec>
inline constexpr int reducing_blocks = order_free<typename Codec::Range> ? 3 : 2;
template <>
inline constexpr int reducing_blocks<Codebook<LInfNorm, LargeTable>> = 2;

// The families of this source; modules.py lists which of them are compiled, and for what.
#define ENCODE_NEAREST 1
#define ENCODE_STOCHASTIC 2
#define REDUCE_NEAREST 3
#define REDUCE_STOCHASTIC 4
#define CODES_NEAREST 5
#define CODES_STOCHASTIC 6

#if IN_MODULE(ENCODE_NEAREST)
KERNEL(256, 3) encode_nearest(const EncodeParams __grid_constant__ params) {
    encode_buckets<false, FromGradient>(params);
}
#endif

#if IN_MODULE(ENCODE_STOCHASTIC)
KERNEL(256, 3) encode_stochastic(const EncodeParams __grid_constant__ params) {
    encode_buckets<Class::draws, FromGradient>(params);
}
#endif

#if IN_MODULE(REDUCE_NEAREST)
KERNEL(256, reducing_blocks<Class>) reduce_nearest(const EncodeParams __grid_constant__ params) {
    encode_buckets<false, FromPayloads<Class>>(params);
}
#endif

#if IN_MODULE(REDUCE_STOCHASTIC)
KERNEL(256, reducing_blocks<Class>) reduce_stochastic(const EncodeParams __grid_constant__ params) {
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
