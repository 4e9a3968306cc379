// The codecs of narrow floating formats whose values share a scale. See codecs.hpp for their shape.
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

// A number of a format from its code without a sign. A code that the format reserves is the next number.
template <class Format>
inline float number_of(int code) {
    const int field = code >> Format::mantissa;
    const int exponent = field > 1 ? field : 1;
    const int steps = code - ((exponent - 1) << Format::mantissa);
    return static_cast<float>(steps) * float_of((exponent + 126 + Format::least - Format::mantissa) << 23);
}

// Whether a GPU converts to a format by an instruction: to nearest even, and no further than the largest
// number.
template <class Format>
inline constexpr bool converts = false;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
template <>
inline constexpr bool converts<E4M3> = true;
template <>
inline constexpr bool converts<E5M2> = true;

// The code of x >= 0. The instruction converts two numbers.
inline I32 converted(E4M3, F32 x) {
    std::uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x.v));
    return {pair};
}
inline I32 converted(E5M2, F32 x) {
    std::uint16_t pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x.v));
    return {pair};
}
#endif

// A sign and a magnitude of the format, in units of a scale X that a derived class finds.
template <class Format>
class FormatCodes {
  public:
    using Code = std::uint8_t;
    using Range = LInfNorm;
    static constexpr std::int64_t record_bytes = 1;
    static constexpr bool draws = true;
    static constexpr bool bounded = true;
    static constexpr bool small_buckets = true;

    bool representable() const { return representable_; }

    template <bool stochastic>
    I32 code(F32 c, F32 u) const {
        const F32 r = absolute(c) * inverse_;
        if constexpr (converts<Format> && !stochastic) return with_sign(converted(Format{}, r), c, bits_);
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

  protected:
    explicit FormatCodes(const Level& level) : bits_(level.bits) {}

    void set_scale(float scale) {
        constexpr int codes = Format::mantissa == 1 ? 8 : 128;
        scale_ = splat(scale);
        bounds[0] = bounds[1] = number_of<Format>(codes - 1) * scale;
    }

    // To encode values of which none is larger than the norm.
    void set_inverse(float inverse, float norm) {
        inverse_ = splat(inverse);
        representable_ = is_finite(norm) && is_finite(bounds[0]);
    }

  private:
    int bits_;
    F32 scale_, inverse_;
    bool representable_;
};

// X is the least power of two with max |c| <= largest X. The record is its exponent plus 127, in a byte
// (E8M0).
template <class Format>
class BlockFloat : public FormatCodes<Format> {
  public:
    BlockFloat(const LInfNorm& range, const Level& level, std::int64_t) : FormatCodes<Format>(level) {
        const std::int32_t norm = bits_of(range.norm());
        const std::int32_t above = (norm & 0x7FFFFF) > Format::largest_mantissa ? 1 : 0;
        const std::int32_t exponent = (norm >> 23) - Format::most + above;
        // Both X and its inverse are normal numbers.
        set(exponent < 1 ? 1 : exponent);
        this->set_inverse(float_of((254 - exponent_) << 23), float_of(norm));
    }

    BlockFloat(const std::uint8_t* record, const Level& level) : FormatCodes<Format>(level) { set(*record); }

    void write(std::uint8_t* record) const { *record = static_cast<std::uint8_t>(exponent_); }

  private:
    // 255 stands for no number; 0 for a power of two below the normal ones.
    void set(std::int32_t exponent) {
        exponent_ = exponent;
        this->set_scale(float_of(exponent == 255 ? 0x7FC00000 : exponent == 0 ? 0x400000 : exponent << 23));
    }

    std::int32_t exponent_;
};

// X is the least number of E4M3, times the unit, with max |c| <= largest X. The record is that number's code.
template <class Format>
class BlockFloatInUnits : public FormatCodes<Format> {
  public:
    // The largest magnitude takes the largest scale. X and its inverse are normal numbers.
    static float unit_for(float largest) {
        const float unit = largest / (largest_scale() * largest_number());
        return unit < 0x1p-117f ? 0x1p-117f : unit;
    }

    BlockFloatInUnits(const LInfNorm& range, const Level& level, std::int64_t) : FormatCodes<Format>(level) {
        const float norm = range.norm();
        record_ = rounded_up(norm * (1.0f / (largest_number() * level.unit)));
        const float scale = number_of<E4M3>(record_) * level.unit;
        this->set_scale(scale);
        this->set_inverse(1.0f / scale, norm);
    }

    // Codes beyond the largest number's, those with a sign among them, stand for no number.
    BlockFloatInUnits(const std::uint8_t* record, const Level& level) : FormatCodes<Format>(level) {
        record_ = *record;
        this->set_scale(record_ > E4M3::largest_code ? float_of(0x7FC00000)
                                                     : number_of<E4M3>(record_) * level.unit);
    }

    void write(std::uint8_t* record) const { *record = static_cast<std::uint8_t>(record_); }

  private:
    static float largest_scale() { return number_of<E4M3>(E4M3::largest_code); }
    static float largest_number() { return number_of<Format>(Format::largest_code); }

    // The code of E4M3 that is not below x, from 1, which has an inverse, to the largest.
    static int rounded_up(float x) {
        constexpr int fewer = 23 - E4M3::mantissa;
        int code;
        if (x < 0x1p-6f) {
            const float steps = x * 0x1p9f;
            code = static_cast<int>(steps);
            if (static_cast<float>(code) < steps) ++code;
        } else {
            const std::uint32_t up = static_cast<std::uint32_t>(bits_of(x)) + ((1u << fewer) - 1);
            code = static_cast<int>(up >> fewer) - ((126 + E4M3::least) << E4M3::mantissa);
        }
        return code < 1 ? 1 : code > E4M3::largest_code ? E4M3::largest_code : code;
    }

    int record_;
};
template <class Format>
inline constexpr std::int64_t unit_bytes<BlockFloatInUnits<Format>> = 4;

}  // namespace gradcomp::GRADCOMP_BODY
