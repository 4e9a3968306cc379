// What one column is scaled by, and when it counts as none: see orthogonalise.hpp.
#pragma once

#include "codecs.hpp"

namespace gradcomp::GRADCOMP_BODY {

// A column whose norm falls below this part of what it was depends on those before it.
inline constexpr double dependent = 0x1p-20;

// The power of two that brings a magnitude, not zero, into [1, 2).
inline double normalising_power(std::uint32_t magnitude) {
    const auto wide = static_cast<double>(__builtin_bit_cast(float, magnitude));
    const std::uint64_t exponent = __builtin_bit_cast(std::uint64_t, wide) >> 52;
    return __builtin_bit_cast(double, (2046 - exponent) << 52);
}

// factor * x, rounded once.
inline float scaled(float x, double factor) {
    return static_cast<float>(static_cast<double>(x) * factor);
}

}  // namespace gradcomp::GRADCOMP_BODY
