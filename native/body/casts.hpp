// The codecs of casts to other floating formats. See codecs.hpp for their shape.
#pragma once

#include "codecs.hpp"

namespace gradcomp::GRADCOMP_BODY {

// bfloat16 of c: towards zero, or away from it if the 16 bits that are cut off and the lane of u make a
// carry, so that the mean over lanes is c. A finite c stays finite.
inline I32 draw_bfloat16(F32 c, F32 u) {
    const I32 lane = truncate(u * splat(0x1p16f));
    const I32 magnitude = as_int(min(absolute(c), splat(float_of(0x7F7F0000))));
    return shift_right(magnitude + lane, 16) | (shift_right(as_int(c), 16) & splat(0x8000));
}

// Half precision after scaling by a power of two, which puts the largest magnitude below 2**15.
class ScaledHalf {
  public:
    using Code = std::uint16_t;
    using Range = LInfNorm;
    static constexpr std::int64_t record_bytes = 4;
    static constexpr bool draws = false;
    static constexpr bool bounded = false;

    ScaledHalf(const Range& range, const Level&, std::int64_t) : representable_(is_finite(range.norm())) {
        const std::int32_t largest = bits_of(range.norm());
        const std::int32_t exponent = (largest >> 23) - 127 - 14;
        // Both the factor and its inverse stay normal numbers.
        const std::int32_t e = largest == 0 ? 0 : exponent < -126 ? -126 : exponent;
        factor_ = splat(float_of((127 + e) << 23));
        inverse_ = splat(float_of((127 - e) << 23));
        factor_scalar_ = float_of((127 + e) << 23);
    }

    ScaledHalf(const std::uint8_t* record, const Level&) : factor_(splat(read_float(record))) {}

    bool representable() const { return representable_; }

    void write(std::uint8_t* record) const { write_float(record, factor_scalar_); }

    template <bool stochastic>
    I32 code(F32 c, F32) const {
        return to_half(c * inverse_);
    }

    F32 value(I32 code) const { return from_half(code) * factor_; }

  private:
    F32 factor_, inverse_;
    float factor_scalar_;
    bool representable_;
};

class Bfloat16 {
  public:
    using Code = std::uint16_t;
    using Range = LInfNorm;
    static constexpr std::int64_t record_bytes = 0;
    static constexpr bool draws = true;
    static constexpr bool bounded = false;

    Bfloat16(const Range& range, const Level&, std::int64_t)
        : representable_(bits_of(range.norm()) < bfloat16_overflow) {}
    Bfloat16(const std::uint8_t*, const Level&) {}

    bool representable() const { return representable_; }
    void write(std::uint8_t*) const {}

    template <bool stochastic>
    I32 code(F32 c, F32 u) const {
        if constexpr (stochastic) return draw_bfloat16(c, u);
        return to_bfloat16(c);
    }

    F32 value(I32 code) const { return from_bfloat16(code); }

  private:
    bool representable_;
};

class Float32 {
  public:
    using Code = std::uint32_t;
    using Range = LInfNorm;
    static constexpr std::int64_t record_bytes = 0;
    static constexpr bool draws = false;
    static constexpr bool bounded = false;

    Float32(const Range& range, const Level&, std::int64_t) : representable_(is_finite(range.norm())) {}
    Float32(const std::uint8_t*, const Level&) {}

    bool representable() const { return representable_; }
    void write(std::uint8_t*) const {}

    template <bool stochastic>
    I32 code(F32 c, F32) const {
        return as_int(c);
    }

    F32 value(I32 code) const { return as_float(code); }

  private:
    bool representable_;
};

}  // namespace gradcomp::GRADCOMP_BODY
