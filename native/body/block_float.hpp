// The codecs of narrow floating formats that share a power of two. See codecs.hpp for their shape.
#pragma once

#include "codecs.hpp"

namespace gradcomp::GRADCOMP_BODY {

// Of a format: bits of its mantissa; the exponent of its smallest normal number, and that of its largest; the
// mantissa of the largest, as a float32 has it; its code.
struct E4M3 {
    static constexpr int mantissa = 3, least = -6, most = 8, largest_mantissa = 0x600000, largest_code = 0x7E;
};
struct E5M2 {
    static constexpr int mantissa = 2, least = -14, most = 15, largest_mantissa = 0x600000,
                         largest_code = 0x7B;
};
struct E2M1 {
    static constexpr int mantissa = 1, least = 0, most = 2, largest_mantissa = 0x400000, largest_code = 0x7;
};

// A sign and a magnitude of the format, in units of the least power of two X with max |c| <= largest X. The
// record is the exponent of X plus 127, in a byte (E8M0).
template <class Format>
class BlockFloat {
  public:
    using Code = std::uint8_t;
    using Range = LInfNorm;
    static constexpr std::int64_t record_bytes = 1;
    static constexpr bool draws = true;
    static constexpr bool bounded = true;

    BlockFloat(const Range& range, const Level& level, std::int64_t) : bits_(level.bits) {
        const std::int32_t norm = bits_of(range.norm());
        const std::int32_t above = (norm & 0x7FFFFF) > Format::largest_mantissa ? 1 : 0;
        const std::int32_t exponent = (norm >> 23) - Format::most + above;
        // Both X and its inverse are normal numbers.
        set(exponent < 1 ? 1 : exponent);
        inverse_ = splat(float_of((254 - exponent_) << 23));
        representable_ = is_finite(float_of(norm)) && is_finite(bounds[0]);
    }

    BlockFloat(const std::uint8_t* record, const Level& level) : bits_(level.bits) { set(*record); }

    bool representable() const { return representable_; }

    void write(std::uint8_t* record) const { *record = static_cast<std::uint8_t>(exponent_); }

    template <bool stochastic>
    I32 code(F32 c, F32 u) const {
        const F32 r = absolute(c) * inverse_;
        // Steps of r's own power of two; below the smallest normal number, of that one's.
        const I32 exponent = max(shift_right(as_int(r), 23), splat(127 + Format::least));
        const F32 steps = as_float(shift_left(splat(254 + Format::mantissa) - exponent, 23));
        const I32 step =
            round_code<stochastic>(r * steps, u, splat(static_cast<float>(2 << Format::mantissa)));
        // A step that reaches the next power of two is that one's first code.
        const I32 magnitude = shift_left(exponent - splat(127 + Format::least), Format::mantissa) + step;
        // A draw near 1 may lift the largest by a step in float32.
        const I32 code = splat(0) - max(splat(0) - magnitude, splat(-Format::largest_code));
        return with_sign(code, c, bits_);
    }

    F32 value(I32 code) const {
        const I32 magnitude = code & splat((1 << (bits_ - 1)) - 1);
        const I32 exponent = max(shift_right(magnitude, Format::mantissa), splat(1));
        const I32 steps = magnitude - shift_left(exponent - splat(1), Format::mantissa);
        const I32 step = shift_left(exponent + splat(126 + Format::least - Format::mantissa), 23);
        const F32 value = to_float(steps) * as_float(step) * scale_;
        return as_float(as_int(value) ^ sign_of_code(code, bits_));
    }

    float bounds[2];

  private:
    // 255 stands for no number; 0 for a power of two below the normal ones.
    void set(std::int32_t exponent) {
        exponent_ = exponent;
        const float scale = float_of(exponent == 255 ? 0x7FC00000
                                     : exponent == 0 ? 0x400000
                                                     : exponent << 23);
        scale_ = splat(scale);
        // A code that the format reserves is the next magnitude.
        constexpr int codes = Format::mantissa == 1 ? 8 : 128;
        constexpr int top = (codes - 1) >> Format::mantissa;
        constexpr int steps = (codes - 1) - ((top - 1) << Format::mantissa);
        bounds[0] = bounds[1] = static_cast<float>(steps) *
                                float_of((top + 126 + Format::least - Format::mantissa) << 23) * scale;
    }

    int bits_;
    std::int32_t exponent_;
    F32 scale_, inverse_;
    bool representable_;
};

}  // namespace gradcomp::GRADCOMP_BODY
