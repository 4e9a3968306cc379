// Payload to outputs, for one codec: GRADCOMP_CLASS. A thread decodes eight elements.

#include "native/body/block_float.hpp"
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
    std::uint64_t payload;
    std::uint64_t flags;  // a byte per row: nothing to decode, the output is NaN
    std::uint64_t bad;    // a byte per row: something came out that is not finite
    std::uint64_t magnitudes;
    double divisor, scale;
};

// What half a warp decodes of a row: strips, a block's all together.
inline constexpr int strips = 4;

struct Part {
    Segment segment;
    std::int64_t row, begin, left;

    explicit Part(const DecodeParams& params) {
        const Place block(params.places);
        row = block.row;
        segment = at<Segment>(params.rows)[row];
        begin = (block.tile * 16 + threadIdx.x / 16) * strips * strip;
        left = segment.length - begin;
    }

    // The thread's elements of a strip.
    std::int64_t place(int k) const { return begin + k * strip + place_in_strip(); }
    int count(int k) const { return count_of(left - k * strip - place_in_strip()); }
};

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
    // A thread without elements looks at its neighbours' bucket.
    Reader<Class> reader(payload, layout, level, count[0] > 0 ? part.place(0) : part.begin);
    enter(reader.codec());
#pragma unroll
    for (int k = 0; k < strips; ++k) {
        if (part.left <= k * strip) continue;
        float x[8] = {};
        if (count[k] > 0) reader.read(packed[k], part.place(k), count[k], x, enter);
        each(k, count[k], x);
    }
}

}  // namespace gradcomp::cuda

KERNEL(256) decode(const DecodeParams __grid_constant__ params) {
    const Part part(params);
    if (part.left <= 0) return;
    if (at<std::uint8_t>(params.flags)[part.row] != 0) {
        float x[8];
        for (float& each : x) each = float_of(0x7FC00000);
        for (int k = 0; k < strips; ++k) write_output_strip(part.segment, part.begin + k * strip, x);
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
        write_output_strip(part.segment, part.begin + k * strip, x);
    });
    if (bad) to<std::uint8_t>(params.bad)[part.row] = 1;
}

KERNEL(256) decode_add(const DecodeParams __grid_constant__ params) {
    const Part part(params);
    if (part.left <= 0) return;
    const Finish finish(1.0f, static_cast<float>(params.scale));
    float* const sums = to<float>(part.segment.output) + part.begin;
    for_strips(
        params, part, [](const Class&) {},
        [&](int k, int, float (&x)[8]) {
            float sum[8] = {};
            read_strip(sums + k * strip, part.left - k * strip, sum);
            finish(x);
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] = sum[i] + x[i];
            write_strip(sums + k * strip, part.left - k * strip, x);
        });
}
