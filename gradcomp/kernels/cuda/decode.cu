// Payload to outputs, for one codec: GRADCOMP_CLASS. A thread decodes eight elements.

#include "native/body/codebook.hpp"
#include "native/body/finish.hpp"
#include "native/body/signs.hpp"

#include "sources.cuh"

using namespace gradcomp;
using namespace gradcomp::cuda;

namespace gradcomp::cuda {

using Class = GRADCOMP_CLASS;

struct DecodeParams {
    std::uint64_t rows, tiles;
    std::int64_t row_count;
    std::uint64_t payload;
    std::uint64_t flags;  // a byte per row: nothing to decode, the output is NaN
    std::uint64_t bad;    // a byte per row: something came out that is not finite
    std::uint64_t magnitudes;
    double divisor, scale;
};

// The thread's elements of a row.
struct Part {
    Segment segment;
    std::int64_t row, first, count;

    explicit Part(const DecodeParams& params) {
        const auto* tiles = at<std::int64_t>(params.tiles);
        row = row_of(tiles, params.row_count, blockIdx.x);
        segment = at<Segment>(params.rows)[row];
        first = 8 * ((blockIdx.x - tiles[row]) * 256 + threadIdx.x);
        count = smaller(group, segment.length - first);
    }
};

// Whether a code of a bucket that begins in this part, occurring or not, finishes as something not finite.
template <class Codec>
inline bool bounds_overflow(const Part& part, const std::uint8_t* payload, const Level& level,
                            const Finish& finish) {
    const std::int64_t size = Payload<Codec>(part.segment).bucket_size;
    bool any = false;
    if constexpr (Codec::bounded) {
        for (std::int64_t bucket = (part.first + size - 1) / size; bucket * size < part.first + part.count;
             ++bucket) {
            const Codec codec(payload + bucket * Codec::record_bytes, level);
            for (const float bound : codec.bounds) any |= overflows(finish(bound), part.segment.dtype);
        }
    }
    return any;
}

}  // namespace gradcomp::cuda

KERNEL(256) decode(const DecodeParams* params) {
    const Part part(*params);
    if (part.count <= 0) return;
    float x[8];
    if (at<std::uint8_t>(params->flags)[part.row] != 0) {
        for (float& each : x) each = float_of(0x7FC00000);
        write_output(part.segment, part.first, part.count, x);
        return;
    }
    const Level level(part.segment, at<float>(params->magnitudes));
    const std::uint8_t* const payload = at<std::uint8_t>(params->payload) + part.segment.payload;
    read_values<Class>(payload, part.segment, level, part.first, part.count, x);
    const Finish finish(static_cast<float>(params->divisor), static_cast<float>(params->scale));
    bool bad = bounds_overflow<Class>(part, payload, level, finish);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        x[i] = finish(F32{x[i]}).v;
        if (!Class::bounded && i < part.count) bad |= overflows(x[i], part.segment.dtype);
    }
    write_output(part.segment, part.first, part.count, x);
    if (bad) const_cast<std::uint8_t*>(at<std::uint8_t>(params->bad))[part.row] = 1;
}

KERNEL(256) decode_add(const DecodeParams* params) {
    const Part part(*params);
    if (part.count <= 0) return;
    float x[8], sum[8] = {};
    const Level level(part.segment, at<float>(params->magnitudes));
    read_values<Class>(at<std::uint8_t>(params->payload) + part.segment.payload, part.segment, level,
                       part.first, part.count, x);
    read_floats(at<float>(part.segment.output) + part.first, part.count, sum);
    const Finish finish(1.0f, static_cast<float>(params->scale));
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = sum[i] + finish(F32{x[i]}).v;
    write_floats(reinterpret_cast<float*>(part.segment.output) + part.first, part.count, x);
}
