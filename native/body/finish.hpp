// From a decoded value to what is written to an output.
#pragma once

#include "codecs.hpp"

namespace gradcomp::GRADCOMP_BODY {

// What becomes of a value on its way to an output.
class Finish {
  public:
    Finish(float divisor, float scale) : divisor_(divisor), inverse_(exact_inverse(divisor)), scale_(scale) {}

    F32 operator()(F32 value) const {
        // Far faster than a division, with the same result.
        value = inverse_ != 0.0f ? value * splat(inverse_) : value / splat(divisor_);
        return value * splat(scale_);
    }
    float operator()(float value) const { return value / divisor_ * scale_; }

    // All of them, with one look at the divisor.
    template <int n>
    void operator()(float (&values)[n]) const {
        if (inverse_ != 0.0f)
            for (float& value : values) value = value * inverse_ * scale_;
        else
            for (float& value : values) value = value / divisor_ * scale_;
    }

  private:
    // Of a power of two, as far as it is a normal number; else 0.
    static float exact_inverse(float x) {
        const std::int32_t bits = bits_of(x);
        const std::int32_t exponent = bits >> 23 & 0xFF;
        return (bits & 0x7FFFFF) == 0 && exponent >= 1 && exponent <= 253 ? 1.0f / x : 0.0f;
    }

    float divisor_;
    float inverse_;
    float scale_;
};

inline std::int32_t overflow_bits(Dtype dtype) {
    switch (dtype) {
        case Dtype::float16:
            return float16_overflow;
        case Dtype::bfloat16:
            return bfloat16_overflow;
        default:
            return float32_overflow;
    }
}

inline bool overflows(float x, Dtype dtype) {
    return (bits_of(x) & 0x7FFFFFFF) >= overflow_bits(dtype);
}

}  // namespace gradcomp::GRADCOMP_BODY
