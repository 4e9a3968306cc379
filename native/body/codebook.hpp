// The codecs whose levels come from a table: a sign and a magnitude in units of a norm, or a level between a
// minimum and a maximum. See codecs.hpp for their shape.
#pragma once

#include "codecs.hpp"

namespace gradcomp::GRADCOMP_BODY {

// A small table holds so many entries.
inline constexpr int small_table_entries = 16;

// The number of the entry to which r is rounded, of 2^k ascending entries, at least two. r lies between the
// first and the last entry.
template <bool stochastic, class Table>
inline I32 round_to_entry(const Table& table, int k, F32 r, F32 u) {
    // The number of entries below r, the first one aside: a bisection. No r is above the last entry, so that
    // there is always an entry behind.
    I32 below = splat(0);
    for (int step = 1 << k >> 1; step > 0; step /= 2)
        below = below + (less(table[below + splat(step)], r) & splat(step));
    const F32 lower = table[below], upper = table[below + splat(1)];
    const F32 distance = r - lower;
    return below - less(stochastic ? u * (upper - lower) : upper - r, distance);
}

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
        return with_sign(round_to_entry<stochastic>(table_, bits_ - 1, r, u), c, bits_);
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

// The level is an entry of the table, in units of the bucket's span, above its minimum: value = low + level
// span. Entries ascend within 0..1; values below the first or above the last one get that one.
template <class Table>
class MinMaxCodebook {
  public:
    using Code = std::uint8_t;
    using Range = MinMax::Range;
    static constexpr std::int64_t record_bytes = 8;
    static constexpr bool draws = true;
    static constexpr bool bounded = true;

    MinMaxCodebook(const Range& range, const Level& level, std::int64_t) : MinMaxCodebook(level) {
        const float low = range.low();
        float span = range.high() - low;
        float inverse = 1.0f / span;
        if (!is_finite(inverse)) span = inverse = 0.0f;
        set(low, span);
        inverse_ = splat(inverse);
        first_ = splat(level.magnitudes[0]);
        last_ = splat(level.magnitudes[(1 << bits_) - 1]);
        representable_ = range.finite() && is_finite(span) && is_finite(bounds[1]);
    }

    MinMaxCodebook(const std::uint8_t* record, const Level& level) : MinMaxCodebook(level) {
        set(read_float(record), read_float(record + 4));
    }

    bool representable() const { return representable_; }

    void write(std::uint8_t* record) const {
        write_float(record, bounds[0]);
        write_float(record + 4, span_scalar_);
    }

    template <bool stochastic>
    I32 code(F32 c, F32 u) const {
        const F32 r = min(max((c - low_) * inverse_, first_), last_);
        return round_to_entry<stochastic>(table_, bits_, r, u);
    }

    F32 value(I32 code) const { return low_ + table_[code] * span_; }

    float bounds[2];

  private:
    explicit MinMaxCodebook(const Level& level) : bits_(level.bits), table_(level.magnitudes) {}

    void set(float low, float span) {
        low_ = splat(low);
        span_ = splat(span);
        span_scalar_ = span;
        bounds[0] = low;
        bounds[1] = low + span;
    }

    int bits_;
    Table table_;
    float span_scalar_;
    F32 low_, span_, inverse_, first_, last_;
    bool representable_;
};

}  // namespace gradcomp::GRADCOMP_BODY
