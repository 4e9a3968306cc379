// The codecs of a sign and a magnitude from a table. See codecs.hpp for their shape.
#pragma once

#include "codecs.hpp"

namespace gradcomp::GRADCOMP_BODY {

// Up to so many bits, a small table holds the magnitudes: 16 of them.
inline constexpr int small_table_bits = 5;

// Sign and magnitude: the magnitude is an entry of the table, in units of the bucket's norm. Tables ascend
// from 0 to 1, see segments.py; an entry may repeat the one before it.
template <class Norm, class Table>
class Codebook {
  public:
    using Code = std::uint8_t;
    using Range = Norm;
    static constexpr std::int64_t record_bytes = 4;
    static constexpr bool draws = true;
    static constexpr bool bounded = true;

    Codebook(const Range& range, const Level& level, std::int64_t) : Codebook(level) {
        const NormScale scale(range.norm(), 1.0f);
        set(scale.norm);
        inverse_ = splat(scale.inverse);
    }

    Codebook(const std::uint8_t* record, const Level& level) : Codebook(level) { set(read_float(record)); }

    bool representable() const { return is_finite(bounds[0]); }

    void write(std::uint8_t* record) const { write_float(record, bounds[0]); }

    template <bool stochastic>
    I32 code(F32 c, F32 u) const {
        const F32 r = min(absolute(c) * inverse_, splat(1.0f));
        // The number of entries below r, the first one aside: a bisection. The last one is 1, so that there
        // is always an entry behind.
        I32 below = splat(0);
        for (int step = 1 << (bits_ - 2); step > 0; step /= 2)
            below = below + (less(table_[below + splat(step)], r) & splat(step));
        const F32 lower = table_[below], upper = table_[below + splat(1)];
        const F32 distance = r - lower;
        const I32 above = less(stochastic ? u * (upper - lower) : upper - r, distance);
        return with_sign(below - above, c, bits_);
    }

    F32 value(I32 code) const {
        const F32 magnitude = table_[code & splat((1 << (bits_ - 1)) - 1)] * norm_;
        return as_float(as_int(magnitude) ^ sign_of_code(code, bits_));
    }

    float bounds[2];

  private:
    explicit Codebook(const Level& level) : bits_(level.bits), table_(level.magnitudes) {}

    void set(float norm) {
        norm_ = splat(norm);
        bounds[0] = bounds[1] = norm;
    }

    int bits_;
    Table table_;
    F32 norm_, inverse_;
};

}  // namespace gradcomp::GRADCOMP_BODY
