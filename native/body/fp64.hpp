// The codec of float64, which copies: contributions, values and outputs are doubles, residuals stay float32.
#pragma once

#include <cstring>
#include <span>

#include "simd.hpp"

namespace gradcomp::GRADCOMP_BODY {

inline constexpr std::int64_t double_block = block_size / 2;

// Doubles in a payload are not aligned.
inline void read_doubles(const std::uint8_t* in, std::int64_t first, std::int64_t count, double* out) {
    std::memcpy(out, in + 8 * first, static_cast<std::size_t>(8 * count));
}

inline void write_doubles(std::uint8_t* out, std::int64_t first, std::int64_t count, const double* in) {
    std::memcpy(out + 8 * first, in, static_cast<std::size_t>(8 * count));
}

inline bool all_finite(const double* x, std::int64_t count) {
    bool finite = true;
    for (std::int64_t i = 0; i < count; ++i)
        finite &= __builtin_bit_cast(std::uint64_t, x[i]) << 1 < 0xFFE0000000000000;
    return finite;
}

// Write a block of contributions, which may first get the residual added, and the next residual.
inline bool encode_doubles(const Segment& segment, std::int64_t first, std::int64_t count, double* c,
                           double decay, std::uint8_t* codes) {
    if (segment.residual != 0) {
        float r[double_block];
        std::memcpy(r, reinterpret_cast<const float*>(segment.residual) + first,
                    static_cast<std::size_t>(count) * sizeof(float));
        for (std::int64_t i = 0; i < count; ++i) c[i] = c[i] + decay * static_cast<double>(r[i]);
    }
    if (segment.next_residual != 0)
        std::memset(reinterpret_cast<float*>(segment.next_residual) + first, 0,
                    static_cast<std::size_t>(count) * sizeof(float));
    write_doubles(codes, first, count, c);
    return all_finite(c, count);
}

// Each returns whether everything is finite.

inline bool encode_fp64(const Segment& segment, double scale, double decay, std::uint8_t* codes) {
    const auto* gradient = reinterpret_cast<const std::uint8_t*>(segment.gradient);
    for (std::int64_t first = 0; first < segment.length; first += double_block) {
        const std::int64_t count = smaller(double_block, segment.length - first);
        double c[double_block] = {};
        if (gradient != nullptr) read_doubles(gradient, first, count, c);
        for (std::int64_t i = 0; i < count; ++i) c[i] = scale * c[i];
        if (!encode_doubles(segment, first, count, c, decay, codes)) return false;
    }
    return true;
}

// The codes of the payloads, and those of the mean, begin at `at`.
inline bool reduce_fp64(const Segment& segment, std::span<const std::uint8_t* const> payloads,
                        std::int64_t at, double divisor, double decay, std::uint8_t* out) {
    for (std::int64_t first = 0; first < segment.length; first += double_block) {
        const std::int64_t count = smaller(double_block, segment.length - first);
        double c[double_block];
        read_doubles(payloads[0] + at, first, count, c);
        for (const std::uint8_t* payload : payloads.subspan(1)) {
            double values[double_block];
            read_doubles(payload + at, first, count, values);
            for (std::int64_t i = 0; i < count; ++i) c[i] = c[i] + values[i];
        }
        for (std::int64_t i = 0; i < count; ++i) c[i] = c[i] / divisor;
        if (!encode_doubles(segment, first, count, c, decay, out + at)) return false;
    }
    return true;
}

inline bool decode_fp64(const Segment& segment, const std::uint8_t* codes, double divisor, double scale) {
    bool finite = true;
    for (std::int64_t first = 0; first < segment.length; first += double_block) {
        const std::int64_t count = smaller(double_block, segment.length - first);
        double x[double_block];
        read_doubles(codes, first, count, x);
        for (std::int64_t i = 0; i < count; ++i) x[i] = x[i] / divisor * scale;
        write_doubles(reinterpret_cast<std::uint8_t*>(segment.output), first, count, x);
        finite &= all_finite(x, count);
    }
    return finite;
}

}  // namespace gradcomp::GRADCOMP_BODY
