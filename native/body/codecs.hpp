// The codecs of float32, each as the arithmetic of one bucket. All have this shape:
//
//   Code                    how a code is stored before packing
//   record_bytes            of a bucket's scale record; 0: no record, and buckets mean nothing
//   draws                   whether it can round stochastically
//   Range                   what one pass over a bucket's contributions finds out; padding() does not
//                           disturb it; of several chunks (sums.hpp) end_chunk() ends each, then join()
//                           joins them. On a GPU blocks share a large bucket: gather() gives all lanes what
//                           they have found together, merge() adds another range; sums go by end_chunk()
//   Codec(range, level, n)  to encode a bucket of n elements; representable() says whether all is finite,
//                           write() writes the record
//   Codec(record, level)    to decode
//   code<stochastic>(c, u)  the code of c; u in (0, 1) rounds it
//   value(code)             what a decoder makes of it
//   bounded, bounds         whether, and which, two values enclose those of all codes, hostile records
//                           included
//
// Where unit_bytes<Codec> is not 0, scales are multiples of a segment's unit, with which its payload begins:
//
//   unit_for(largest)       of a segment with this largest magnitude; not finite if that is not
#pragma once

#include <cstring>

#include "../segment.hpp"
#include "sums.hpp"

namespace gradcomp::GRADCOMP_BODY {

inline std::int32_t bits_of(float x) {
    return __builtin_bit_cast(std::int32_t, x);
}
inline float float_of(std::int32_t bits) {
    return __builtin_bit_cast(float, bits);
}
inline bool is_finite(float x) {
    return (bits_of(x) & 0x7FFFFFFF) < float32_overflow;
}

inline float read_float(const std::uint8_t* p) {
    float x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline void write_float(std::uint8_t* p, float x) {
    std::memcpy(p, &x, sizeof x);
}

// Bytes of the unit of a segment's scales.
template <class Codec>
inline constexpr std::int64_t unit_bytes = 0;

// Whether the lattice of a codec is moved by Level::shift.
template <class Codec>
inline constexpr bool shifts = false;

// Bits of a code, and the magnitudes that a codebook has for them; the unit of scales, and the shift of a
// lattice in its steps, where there are such.
struct Level {
    int bits;
    const float* magnitudes;
    float unit = 0.0f;
    float shift = 0.0f;

    Level(const Segment& segment, const float* all_magnitudes)
        : bits(segment.bits),
          magnitudes(all_magnitudes == nullptr ? nullptr
                                               : all_magnitudes + segment.bits * magnitudes_per_row) {}
    explicit Level(int bits_of_bucket) : bits(bits_of_bucket), magnitudes(nullptr) {}
};

// What the 16-bit draws of a step are shifted by, see gradcomp/kernels/philox.py.
inline float draw_offset(std::uint32_t step) {
    return (static_cast<float>(step * 0x9E3779B9u >> 25) + 0.5f) / 128.0f;
}

// Codes of t >= 0: rounded to nearest even, or to floor(t + u); at most `limit`.
template <bool stochastic>
inline I32 round_code(F32 t, F32 u, F32 limit) {
    // limit is a whole number, so that clamping first gives the same code.
    if constexpr (stochastic) return truncate(min(t + u, limit));
    return round_to_even(min(t, limit));
}

class MinMax {
  public:
    using Code = std::uint8_t;
    static constexpr std::int64_t record_bytes = 8;
    static constexpr bool draws = true;
    static constexpr bool bounded = true;

    class Range {
      public:
        static float padding(const float* c) { return c[0]; }
        void add(F32 c) {
            low_ = min(low_, c);
            high_ = max(high_, c);
            largest_ = GRADCOMP_BODY::max(largest_, magnitude_bits(c));
        }
        template <class Trees>
        void end_chunk(Trees&) {}
        template <class Trees>
        void join(const Trees&) {}
        void gather() {
            low_ = splat(reduce_min(low_));
            high_ = splat(reduce_max(high_));
            largest_ = splat(reduce_max(largest_));
        }
        void merge(const Range& other) {
            low_ = min(low_, other.low_);
            high_ = GRADCOMP_BODY::max(high_, other.high_);
            largest_ = GRADCOMP_BODY::max(largest_, other.largest_);
        }
        // The sum turns -0 into +0, whichever of the two a minimum picked.
        float low() const { return reduce_min(low_) + 0.0f; }
        float high() const { return reduce_max(high_) + 0.0f; }
        // Minima and maxima lose a NaN.
        bool finite() const { return reduce_max(largest_) < float32_overflow; }

      private:
        F32 low_ = splat(__builtin_inff());
        F32 high_ = splat(-__builtin_inff());
        I32 largest_ = splat(0);
    };

    MinMax(const Range& range, const Level& level, std::int64_t) : levels_(levels(level.bits)) {
        const float low = range.low();
        const float span = range.high() - low;
        float unit = span / levels_;
        float inverse = levels_ / span;
        if (!is_finite(inverse)) unit = inverse = 0.0f;
        set(low, unit);
        inverse_ = splat(inverse);
        representable_ = range.finite() && is_finite(unit);
    }

    // To encode a bucket whose range is finite, and can be divided into steps unless it takes no bits.
    MinMax(float low, float span, int bits) : levels_(levels(bits)), representable_(true) {
        set(low, bits == 0 ? 0.0f : span / levels_);
        inverse_ = splat(bits == 0 ? 0.0f : levels_ / span);
    }

    MinMax(const std::uint8_t* record, const Level& level) : levels_(levels(level.bits)) {
        set(read_float(record), read_float(record + 4));
    }

    bool representable() const { return representable_; }

    void write(std::uint8_t* record) const {
        write_float(record, bounds[0]);
        write_float(record + 4, unit_scalar_);
    }

    template <bool stochastic>
    I32 code(F32 c, F32 u) const {
        return round_code<stochastic>((c - low_) * inverse_, u, splat(levels_));
    }

    F32 value(I32 code) const { return low_ + to_float(code) * unit_; }

    float bounds[2];

  protected:
    // Moves all levels, by so many steps.
    void move(float steps) {
        set(bounds[0] + steps * unit_scalar_, unit_scalar_);
        representable_ = representable_ && is_finite(bounds[1]);
    }

    // To nearest; what rounding has moved beyond the first or the last level gets that one.
    I32 nearest(F32 c) const {
        return round_to_even(min(max((c - low_) * inverse_, splat(0.0f)), splat(levels_)));
    }

  private:
    static float levels(int bits) { return static_cast<float>((1 << bits) - 1); }

    void set(float low, float unit) {
        low_ = splat(low);
        unit_ = splat(unit);
        unit_scalar_ = unit;
        bounds[0] = low;
        bounds[1] = low + levels_ * unit;
    }

    float levels_;
    float unit_scalar_;
    F32 low_, unit_, inverse_;
    bool representable_;
};

// The encoder of a random shift: to nearest on a lattice that is moved by the same part of a step in all
// buckets of a layer. MinMax decodes it.
class ShiftedMinMax : public MinMax {
  public:
    static constexpr bool draws = false;  // once for a layer, see Level

    ShiftedMinMax(const Range& range, const Level& level, std::int64_t count) : MinMax(range, level, count) {
        move(level.shift);
    }
    ShiftedMinMax(const std::uint8_t* record, const Level& level) : MinMax(record, level) {}

    template <bool>
    I32 code(F32 c, F32) const {
        return nearest(c);
    }
};

template <>
inline constexpr bool shifts<ShiftedMinMax> = true;

class L2Norm {
  public:
    static float padding(const float*) { return 0.0f; }
    void add(F32 c) { squares_.add(c); }
    template <class Trees>
    void end_chunk(Trees& trees) {
        squares_.end_chunk(trees[0]);
    }
    template <class Trees>
    void join(const Trees& trees) {
        squares_.join(trees[0]);
    }
    void gather() {}
    void merge(const L2Norm&) {}
    float norm() const { return static_cast<float>(__builtin_sqrt(squares_.total())); }

  private:
    OrderedSum<SquareSums> squares_;
};

class LInfNorm {
  public:
    static float padding(const float*) { return 0.0f; }
    void add(F32 c) { largest_ = max(largest_, magnitude_bits(c)); }
    template <class Trees>
    void end_chunk(Trees&) {}
    template <class Trees>
    void join(const Trees&) {}
    void gather() { largest_ = splat(reduce_max(largest_)); }
    void merge(const LInfNorm& other) { largest_ = max(largest_, other.largest_); }
    float norm() const { return float_of(reduce_max(largest_)); }

  private:
    I32 largest_ = splat(0);
};

// A norm and the steps that it is divided into. A norm too small to be divided by counts as zero.
struct NormScale {
    float norm;
    float inverse;

    NormScale(float measured, float steps) : norm(measured), inverse(steps / measured) {
        if (!is_finite(inverse) && norm == norm) norm = inverse = 0.0f;
    }
};

// A magnitude with the sign of c in the top one of its bits; zero has no sign.
inline I32 with_sign(I32 magnitude, F32 c, int bits) {
    const I32 negative = as_int(c) & (splat(0) - magnitude) & splat(INT32_MIN);
    return magnitude | shift_right(negative, 32 - bits);
}

// The top bit of a code, where a float has its sign.
inline I32 sign_of_code(I32 code, int bits) {
    return shift_left(shift_right(code, bits - 1), 31);
}

// Sign and magnitude, for two bits or more: a magnitude of steps of norm / (2**(bits-1) - 1).
template <class Norm>
class SignMagnitude {
  public:
    using Code = std::uint8_t;
    using Range = Norm;
    static constexpr std::int64_t record_bytes = 4;
    static constexpr bool draws = true;
    static constexpr bool bounded = true;

    SignMagnitude(const Range& range, const Level& level, std::int64_t) {
        const NormScale scale(range.norm(), steps(level.bits));
        set(scale.norm, level.bits);
        inverse_ = splat(scale.inverse);
    }

    SignMagnitude(const std::uint8_t* record, const Level& level) { set(read_float(record), level.bits); }

    bool representable() const { return is_finite(norm_); }

    void write(std::uint8_t* record) const { write_float(record, norm_); }

    template <bool stochastic>
    I32 code(F32 c, F32 u) const {
        const I32 magnitude = round_code<stochastic>(absolute(c) * inverse_, u, splat(steps(bits_)));
        return with_sign(magnitude, c, bits_);
    }

    F32 value(I32 code) const {
        const I32 magnitude = code & splat((1 << (bits_ - 1)) - 1);
        return as_float(as_int(to_float(magnitude) * unit_) ^ sign_of_code(code, bits_));
    }

    float bounds[2];

  private:
    static float steps(int bits) { return static_cast<float>((1 << (bits - 1)) - 1); }

    void set(float norm, int bits) {
        const float unit = norm / steps(bits);
        bits_ = bits;
        norm_ = norm;
        unit_ = splat(unit);
        bounds[0] = bounds[1] = steps(bits) * unit;
    }

    int bits_;
    float norm_;
    F32 unit_, inverse_;
};

// One bit: plus or minus the norm, drawn so that the mean is kept. To nearest it is Sign<MeanMagnitude>.
template <class Norm>
class PureSign {
  public:
    using Code = std::uint8_t;
    using Range = Norm;
    static constexpr std::int64_t record_bytes = 4;
    static constexpr bool draws = true;
    static constexpr bool bounded = true;

    PureSign(const Range& range, const Level&, std::int64_t) {
        const NormScale scale(range.norm(), 1.0f);
        set(scale.norm);
        inverse_ = splat(scale.inverse);
    }

    PureSign(const std::uint8_t* record, const Level&) { set(read_float(record)); }

    bool representable() const { return is_finite(bounds[0]); }

    void write(std::uint8_t* record) const { write_float(record, bounds[0]); }

    template <bool stochastic>
    I32 code(F32 c, F32 u) const {
        const F32 positive_probability = (c * inverse_ + splat(1.0f)) * splat(0.5f);
        return splat(1) + less(u, positive_probability);
    }

    F32 value(I32 code) const { return as_float(as_int(norm_) ^ shift_left(code, 31)); }

    float bounds[2];

  private:
    void set(float norm) {
        norm_ = splat(norm);
        bounds[0] = bounds[1] = norm;
    }

    F32 norm_, inverse_;
};

}  // namespace gradcomp::GRADCOMP_BODY
