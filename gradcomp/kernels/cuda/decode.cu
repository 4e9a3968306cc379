// Payload to outputs, for one codec: GRADCOMP_CLASS. A thread decodes eight elements of each strip.
//
// A block goes through tiles, as far apart as there are blocks. While it works on one, the next one's place
// is on its way, and then its codes, to the cache that all processors share.

#include "native/body/block_float.hpp"
#include "native/body/casts.hpp"
#include "native/body/codebook.hpp"
#include "native/body/finish.hpp"
#include "native/body/signs.hpp"

#include "sources.cuh"

using namespace gradcomp;
using namespace gradcomp::cuda;

namespace gradcomp::cuda {

using Class = GRADCOMP_CLASS;

struct DecodeParams {
    std::uint64_t rows, places;  // see Place
    std::int64_t tiles;
    std::uint64_t payload;
    std::uint64_t flags;  // a byte per row: nothing to decode, the output is NaN
    std::uint64_t bad;    // a byte per row: something came out that is not finite
    std::uint64_t magnitudes;
    double divisor, scale;
};

// What a team decodes of a tile. The teams of a warp stay together: the first one has the more of both.
inline constexpr int strips = held / strip;

struct Part {
    const Segment& segment;  // in global memory: a copy would take registers
    std::uint32_t row;
    std::int64_t begin, left;
    std::int64_t first;  // of the warp's elements
    std::int64_t most;   // what is left for its first team
    std::int64_t least;  // and for its second one

    Part(const DecodeParams& params, const Place& place)
        : segment(at<Segment>(params.rows)[place.row]), row(place.row) {
        const auto team = static_cast<int>(threadIdx.x) / team_threads, second = team % 2;
        begin = (std::int64_t{place.tile} * (256 / team_threads) + team) * held;
        first = begin - second * held;
        left = segment.length - begin;
        most = segment.length - first;
        least = most - held;
    }

    // The thread's elements of a strip.
    std::int64_t place(int k) const { return begin + k * strip + place_in_strip(); }
    int count(int k) const { return count_of(left - k * strip - place_in_strip()); }
};

inline void fetch_ahead(const DecodeParams& params, const Part& part) {
    using Code = Class::Code;
    if (part.left <= 0) return;
    const Payload<Class> layout(part.segment);
    const std::uint8_t* const payload = at<std::uint8_t>(params.payload) + part.segment.payload;
    fetch_ahead(payload + layout.scale_bytes + place_of_codes<Code>(part.begin, part.segment.bits),
                bytes_of<Code>(static_cast<int>(smaller(held, part.left)), part.segment.bits), team_rank(),
                team_threads);
    if (Class::record_bytes > 0 && team_rank() == 0)
        prefetch_l2(payload + place_of_record<Class>(part.begin / layout.bucket_size));
}

// `each` gets the numbers of strips, their values and how many there are; `enter` gets every codec that a
// thread needs.
template <class Enter, class Each>
inline void for_strips(const DecodeParams& params, const Part& part, Enter enter, Each each) {
    using Code = Class::Code;
    const Level level(part.segment, at<float>(params.magnitudes));
    const Payload<Class> layout(part.segment);
    const std::uint8_t* const payload = at<std::uint8_t>(params.payload) + part.segment.payload;
    const std::uint8_t* const codes =
        payload + layout.scale_bytes + place_of_codes<Code>(part.place(0), part.segment.bits);
    Packed<Code> packed[strips];
    int count[strips];
#pragma unroll
    for (int k = 0; k < strips; ++k) {
        count[k] = part.count(k);
        packed[k].read(codes + place_of_codes<Code>(k * strip, part.segment.bits), count[k],
                       part.segment.bits);
    }
    // A thread without elements reads its neighbours' bucket, which exists.
    Reader<Class> reader(payload, layout, level, count[0] > 0 ? part.place(0) : part.first);
    enter(reader.codec());
#pragma unroll
    for (int k = 0; k < strips; ++k) {
        if (part.most <= k * strip) continue;
        float x[8] = {};
        if (count[k] > 0) reader.read(packed[k], part.place(k), count[k], x, enter);
        each(k, count[k], x);
    }
}

// A tile of decode, of which the warp has some elements.
inline void decode_tile(const DecodeParams& params, const Part& part) {
    if (at<std::uint8_t>(params.flags)[part.row] != 0) {
        float x[8];
        for (float& each : x) each = float_of(0x7FC00000);
        for (int k = 0; k < strips; ++k)
            write_output_strip(part.segment, part.begin + k * strip, part.least - k * strip, x);
        return;
    }
    const Finish finish(static_cast<float>(params.divisor), static_cast<float>(params.scale));
    const Dtype dtype = part.segment.dtype;
    bool bad = false;
    // Where codes are bounded, whether one that need not occur finishes as something not finite counts.
    const auto enter = [&]<class Codec>(const Codec& codec) {
        if constexpr (Codec::bounded)
            for (const float bound : codec.bounds) bad |= overflows(finish(bound), dtype);
    };
    for_strips(params, part, enter, [&](int k, int count, float (&x)[8]) {
        finish(x);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (!Class::bounded && i < count) bad |= overflows(x[i], dtype);
        write_output_strip(part.segment, part.begin + k * strip, part.least - k * strip, x);
    });
    if (bad) to<std::uint8_t>(params.bad)[part.row] = 1;
}

inline void add_tile(const DecodeParams& params, const Part& part) {
    const Finish finish(1.0f, static_cast<float>(params.scale));
    float* const sums = to<float>(part.segment.output) + part.begin;
    for_strips(
        params, part, [](const Class&) {},
        [&](int k, int, float (&x)[8]) {
            float sum[8] = {};
            read_strip(sums + k * strip, part.left - k * strip, part.least - k * strip, sum);
            finish(x);
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] = sum[i] + x[i];
            write_strip(sums + k * strip, part.left - k * strip, part.least - k * strip, x);
        });
}

template <class Work>
inline void for_parts(const DecodeParams& params, Work work) {
    for_tiles(params, [&](const Place& place, const Place& next, bool more) {
        if (more) fetch_ahead(params, Part(params, next));
        const Part part(params, place);
        if (part.most > 0) work(params, part);
    });
}

}  // namespace gradcomp::cuda

// Three blocks share a processor's registers, 80 for a thread; two where that is not enough.
template <class Codec>
inline constexpr int decoding_blocks = 3;
template <>
inline constexpr int decoding_blocks<ScaledHalf> = 2;
template <class Norm>
inline constexpr int decoding_blocks<SignMagnitude<Norm>> = 2;
template <class Norm>
inline constexpr int decoding_blocks<Codebook<Norm, LargeTable>> = 2;
template <>
inline constexpr int decoding_blocks<MinMaxCodebook<LargeTable>> = 2;

KERNEL(256, decoding_blocks<Class>) decode(const DecodeParams __grid_constant__ params) {
    for_parts(params, decode_tile);
}

KERNEL(256, decoding_blocks<Class>) decode_add(const DecodeParams __grid_constant__ params) {
    for_parts(params, add_tile);
}
