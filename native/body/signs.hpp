// The codecs of one bit per value: a sign, and what it stands for in its bucket. See codecs.hpp for their
// shape.
#pragma once

#include "codecs.hpp"

namespace gradcomp::GRADCOMP_BODY {

// Mean magnitude of a bucket.
class MeanMagnitude {
  public:
    static constexpr bool votes = false;
    static float padding(const float*) { return 0.0f; }
    void add(F32 c) { sum_.add(absolute(c)); }
    template <class Trees>
    void end_chunk(Trees& trees) {
        sum_.end_chunk(trees[0]);
    }
    template <class Trees>
    void join(const Trees& trees) {
        sum_.join(trees[0]);
    }
    void gather() {}
    void merge(const MeanMagnitude&) {}
    float scale(std::int64_t elements) const {
        return static_cast<float>(sum_.total() / static_cast<double>(elements));
    }

  private:
    OrderedSum<LaneSums> sum_;
};

// 1 if anything in a bucket is not zero, else 0; not finite if something is not.
class Presence {
  public:
    static constexpr bool votes = true;
    static float padding(const float*) { return 0.0f; }
    void add(F32 c) { largest_ = max(largest_, magnitude_bits(c)); }
    template <class Trees>
    void end_chunk(Trees&) {}
    template <class Trees>
    void join(const Trees&) {}
    void gather() { largest_ = splat(reduce_max(largest_)); }
    void merge(const Presence& other) { largest_ = max(largest_, other.largest_); }
    float scale(std::int64_t) const {
        const std::int32_t largest = reduce_max(largest_);
        if (largest >= float32_overflow) return float_of(largest);
        return largest == 0 ? 0.0f : 1.0f;
    }

  private:
    I32 largest_ = splat(0);
};

inline I32 code_of_sign(F32 c) {
    return less(c, splat(0.0f)) & splat(1);
}

// Plus or minus the scale of the bucket. Of votes, a zero is drawn, unless all of the bucket is zero.
template <class Scale>
class Sign {
  public:
    using Code = std::uint8_t;
    using Range = Scale;
    static constexpr std::int64_t record_bytes = 4;
    static constexpr bool draws = Scale::votes;
    static constexpr bool bounded = true;

    Sign(const Range& range, const Level&, std::int64_t elements) { set(range.scale(elements)); }
    Sign(const std::uint8_t* record, const Level&) { set(read_float(record)); }

    bool representable() const { return is_finite(bounds[0]); }

    void write(std::uint8_t* record) const { write_float(record, bounds[0]); }

    template <bool stochastic>
    I32 code(F32 c, F32 u) const {
        if constexpr (stochastic) {
            const I32 zero = less(magnitude_bits(c), splat(1));
            return (less(c, splat(0.0f)) | (zero & less(positive_below_, u))) & splat(1);
        }
        return code_of_sign(c);
    }

    F32 value(I32 code) const { return as_float(as_int(scale_) ^ shift_left(code, 31)); }

    float bounds[2];

  private:
    void set(float scale) {
        scale_ = splat(scale);
        positive_below_ = splat(scale == 0.0f ? 1.0f : 0.5f);
        bounds[0] = bounds[1] = scale;
    }

    F32 scale_, positive_below_;
};

// Sums and numbers of the negative elements of a bucket and of the others.
class Sides {
  public:
    static float padding(const float*) { return 0.0f; }
    void add(F32 c) {
        const I32 negative = less(c, splat(0.0f));
        negatives_ = negatives_ - negative;
        low_.add(as_float(as_int(c) & negative));
        high_.add(as_float(as_int(c) & (negative ^ splat(-1))));
    }
    template <class Trees>
    void end_chunk(Trees& trees) {
        low_.end_chunk(trees[0]);
        high_.end_chunk(trees[1]);
    }
    template <class Trees>
    void join(const Trees& trees) {
        low_.join(trees[0]);
        high_.join(trees[1]);
    }
    void gather() { negatives_ = splat(static_cast<std::int32_t>(total(negatives_))); }
    void merge(const Sides& other) { negatives_ = negatives_ + other.negatives_; }
    float low() const { return mean(low_, total(negatives_)); }
    float high(std::int64_t elements) const { return mean(high_, elements - total(negatives_)); }

  private:
    static float mean(const OrderedSum<LaneSums>& sum, std::int64_t count) {
        return static_cast<float>(sum.total() / static_cast<double>(count > 0 ? count : 1));
    }

    OrderedSum<LaneSums> low_, high_;
    I32 negatives_ = splat(0);
};

// The mean of the bucket's negative elements or of its others.
class OneBit {
  public:
    using Code = std::uint8_t;
    using Range = Sides;
    static constexpr std::int64_t record_bytes = 8;
    static constexpr bool draws = false;
    static constexpr bool bounded = true;

    OneBit(const Range& range, const Level&, std::int64_t elements) {
        set(range.low(), range.high(elements));
    }
    OneBit(const std::uint8_t* record, const Level&) { set(read_float(record), read_float(record + 4)); }

    bool representable() const { return is_finite(bounds[0]) && is_finite(bounds[1]); }

    void write(std::uint8_t* record) const {
        write_float(record, bounds[0]);
        write_float(record + 4, bounds[1]);
    }

    template <bool stochastic>
    I32 code(F32 c, F32) const {
        return code_of_sign(c);
    }

    F32 value(I32 code) const { return as_float(high_ ^ (difference_ & (splat(0) - code))); }

    float bounds[2];

  private:
    void set(float low, float high) {
        high_ = as_int(splat(high));
        difference_ = high_ ^ as_int(splat(low));
        bounds[0] = low;
        bounds[1] = high;
    }

    I32 high_, difference_;
};

// MinMax with one bit to nearest: as OneBit, in the record of MinMax.
class TwoMeans {
  public:
    using Code = std::uint8_t;
    using Range = Sides;
    static constexpr std::int64_t record_bytes = 8;
    static constexpr bool draws = false;
    static constexpr bool bounded = true;

    TwoMeans(const Range& range, const Level&, std::int64_t elements) {
        const float low = range.low();
        set(low, range.high(elements) - low);
    }
    TwoMeans(const std::uint8_t* record, const Level&) { set(read_float(record), read_float(record + 4)); }

    bool representable() const { return is_finite(bounds[0]) && is_finite(unit_scalar_); }

    void write(std::uint8_t* record) const {
        write_float(record, bounds[0]);
        write_float(record + 4, unit_scalar_);
    }

    template <bool stochastic>
    I32 code(F32 c, F32) const {
        return splat(1) + less(c, splat(0.0f));
    }

    F32 value(I32 code) const { return low_ + to_float(code) * unit_; }

    float bounds[2];

  private:
    void set(float low, float unit) {
        low_ = splat(low);
        unit_ = splat(unit);
        unit_scalar_ = unit;
        bounds[0] = low;
        bounds[1] = low + unit;
    }

    float unit_scalar_;
    F32 low_, unit_;
};

}  // namespace gradcomp::GRADCOMP_BODY
