// Payload to values.
#pragma once

#include "../parts.hpp"
#include "codecs.hpp"
#include "codes.hpp"
#include "finish.hpp"

namespace gradcomp::GRADCOMP_BODY {

struct PayloadView {
    const std::uint8_t* scales;
    const std::uint8_t* codes;
    Level level;
};

// A piece of a segment in the buffer of a payload, where its scale records and its codes begin at these
// bytes.
template <class Codec>
inline PayloadView view_of(const Segment& segment, Level level, const std::uint8_t* payload,
                           std::int64_t scales, std::int64_t codes) {
    if constexpr (unit_bytes<Codec> > 0)
        if (segment.length > 0) level.unit = read_float(payload + segment.payload);
    return {payload + scales, payload + codes, level};
}

// Values of the elements first..first+count, at most a block, into an array of block_capacity.
template <class Codec>
void read_values(const Segment& segment, const PayloadView& payload, std::int64_t first, std::int64_t count,
                 float* values) {
    CodeBuffer<typename Codec::Code> buffer;
    const auto* codes = read_codes<typename Codec::Code>(payload.codes, segment, first, count, buffer);
    const std::int64_t bucket_size = Codec::record_bytes > 0 ? segment.bucket_size : max_elements;
    std::int64_t bucket = first / bucket_size;
    std::int64_t begin = 0;
    while (begin < count) {
        const std::int64_t end = smaller((bucket + 1) * bucket_size - first, count);
        const Codec codec(payload.scales + bucket * Codec::record_bytes, payload.level);
        // The last vector may reach into the next bucket, which comes after and overwrites it.
        for (std::int64_t i = begin; i < end; i += lanes)
            store(values + i, codec.value(load_widen(codes + i)));
        begin = end;
        ++bucket;
    }
}

enum class Output { float32, streamed_float32, added_float32, float16, bfloat16 };

constexpr std::int64_t output_bytes(Output kind) {
    return kind == Output::float16 || kind == Output::bfloat16 ? 2 : 4;
}

template <Output kind>
inline void write_vector(void* out, F32 x) {
    if constexpr (kind == Output::float32) store(static_cast<float*>(out), x);
    if constexpr (kind == Output::streamed_float32) stream(static_cast<float*>(out), x);
    if constexpr (kind == Output::added_float32)
        store(static_cast<float*>(out), load(static_cast<float*>(out)) + x);
    if constexpr (kind == Output::float16) store_narrow(static_cast<std::uint16_t*>(out), to_half(x));
    if constexpr (kind == Output::bfloat16) store_narrow(static_cast<std::uint16_t*>(out), to_bfloat16(x));
}

// Finish and write a block of values; returns the largest magnitude's bits. Values beyond count are zero.
template <Output kind>
std::int32_t write_values(const float* values, std::int64_t count, const Finish& finish, std::uint8_t* out) {
    constexpr std::int64_t size = output_bytes(kind);
    I32 largest = splat(0);
    std::int64_t i = 0;
    for (; i + lanes <= count; i += lanes) {
        const F32 x = finish(load(values + i));
        largest = max(largest, magnitude_bits(x));
        write_vector<kind>(out + i * size, x);
    }
    if (i < count) {
        const F32 x = finish(load(values + i));
        largest = max(largest, magnitude_bits(x));
        alignas(64) std::uint8_t rest[lanes * size];
        const auto bytes = static_cast<std::size_t>((count - i) * size);
        if constexpr (kind == Output::added_float32) {
            std::memset(rest, 0, sizeof rest);
            std::memcpy(rest, out + i * size, bytes);
        }
        write_vector<kind>(rest, x);
        std::memcpy(out + i * size, rest, bytes);
    }
    return reduce_max(largest);
}

using WriteValues = std::int32_t (*)(const float*, std::int64_t, const Finish&, std::uint8_t*);

inline WriteValues choose_writer(Dtype dtype, bool added, bool streamed) {
    if (added) return write_values<Output::added_float32>;
    if (streamed) return write_values<Output::streamed_float32>;
    switch (dtype) {
        case Dtype::float16:
            return write_values<Output::float16>;
        case Dtype::bfloat16:
            return write_values<Output::bfloat16>;
        default:
            return write_values<Output::float32>;
    }
}

// Whether a code of some bucket, occurring or not, finishes as something that is not finite.
template <class Codec>
bool bounds_overflow(const Segment& segment, const PayloadView& payload, const Finish& finish) {
    const std::int64_t buckets = (segment.length + segment.bucket_size - 1) / segment.bucket_size;
    bool any = false;
    for (std::int64_t bucket = 0; bucket < buckets; ++bucket) {
        const Codec codec(payload.scales + bucket * Codec::record_bytes, payload.level);
        for (const float bound : codec.bounds) any |= overflows(finish(bound), segment.dtype);
    }
    return any;
}

// Write a segment's output, or add to it, a block at a time, from the values that read(first, count, values)
// gives; returns the largest magnitude's bits.
template <class Read>
std::int32_t write_blocks(const Segment& segment, const Finish& finish, bool added, Read read) {
    auto* const out = reinterpret_cast<std::uint8_t*>(segment.output);
    const std::int64_t element_bytes = segment.dtype == Dtype::float32 ? 4 : 2;
    const bool streaming = !added && segment.dtype == Dtype::float32 && segment.length >= streaming_length &&
                           segment.output % sizeof(float) == 0;
    // A streamed vector must be aligned: a short block at first, which is not streamed, aligns the others.
    const auto unaligned = static_cast<std::int64_t>(streaming ? -segment.output % 64 / sizeof(float) : 0);

    alignas(64) float values[block_capacity];
    std::int32_t largest = 0;
    std::int64_t count = 0;
    for (std::int64_t first = 0; first < segment.length; first += count) {
        count = smaller(first < unaligned ? unaligned : block_size, segment.length - first);
        read(first, count, values);
        for (std::int64_t i = count; i < whole_vectors(count); ++i) values[i] = 0.0f;
        const WriteValues write = choose_writer(segment.dtype, added, streaming && first >= unaligned);
        const std::int32_t found = write(values, count, finish, out + first * element_bytes);
        largest = found > largest ? found : largest;
    }
    return largest;
}

// Decode a segment to its output, or add it to that; returns whether something is not finite there.
template <class Codec>
bool decode_segment(const Segment& segment, const PayloadView& payload, const Finish& finish, bool added) {
    const std::int32_t largest =
        write_blocks(segment, finish, added, [&](std::int64_t first, std::int64_t count, float* values) {
            read_values<Codec>(segment, payload, first, count, values);
        });
    if constexpr (Codec::bounded) return bounds_overflow<Codec>(segment, payload, finish);
    return largest >= overflow_bits(segment.dtype);
}

}  // namespace gradcomp::GRADCOMP_BODY
