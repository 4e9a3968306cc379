// Bits by quantisation bucket: how many bits each bucket of a segment takes. gradcomp/kernels/reference_bits.py
// defines the choice; see there for the words.
#pragma once

#include "codecs.hpp"

namespace gradcomp::GRADCOMP_BODY {

// Classes of ranges that are told apart, and how many of them a bucket is above the threshold at 2 to 8 bits.
inline constexpr int classes = 512;
inline constexpr int class_steps[] = {0, 63, 103, 139, 173, 205, 238};
inline constexpr int most_shift = class_steps[6] + classes - 1;

// A range too small to be divided into steps.
inline bool is_flat(float span) {
    return span < 0x1p-119f;
}

inline int class_of(float span) {
    return bits_of(span) >> 18;
}

// Bits so many classes above the threshold for two bits.
class BitsTable {
  public:
    constexpr BitsTable() : bits_() {
        for (int at = 0; at < size; ++at) {
            int bits = 1;
            for (const int step : class_steps) bits += at - below >= step ? 1 : 0;
            bits_[at] = static_cast<std::uint8_t>(bits);
        }
    }

    constexpr int operator()(int above) const { return bits_[below + above]; }

  private:
    static constexpr int below = classes, size = below + most_shift + 1;
    std::uint8_t bits_[size];
};
inline constexpr BitsTable bits_at;

// 12 e(b).
inline double error_at(int bits) {
    const int levels = (1 << bits) - 1;
    return (bits == 1 ? 3.0 : 2.0) / (static_cast<double>(levels) * static_cast<double>(levels));
}

// The choice for one segment: first open() with the largest range of all that are not flat, then add() every
// bucket, then choose().
class Allocation {
  public:
    Allocation(Codec codec, int level) : least_bytes_(codec == Codec::minmax_least_bytes), level_(level) {}

    void open(float largest_span) {
        largest_ = class_of(largest_span);
        std::memset(weights_, 0, sizeof weights_);
        std::memset(counts_, 0, sizeof counts_);
    }

    // Flat ones count for what there is to share only.
    void add(float span, std::int64_t groups) {
        groups_ += groups;
        if (is_flat(span)) return;
        const int at = depth(span);
        const std::int64_t mantissa = ((bits_of(span) & 0x7FFFFF) | 0x800000) >> 11;
        weights_[at] += groups * mantissa * mantissa;
        counts_[at] += groups;
        varying_ += groups;
    }

    void choose() {
        weights_[classes - 1] = 0;
        for (int at = 0; at < classes; ++at) {
            if (counts_[at] == 0) continue;
            const int octaves = (largest_ >> 5) - ((largest_ - at) >> 5);
            depths_[used_] = at;
            counts_[used_] = counts_[at];
            // A power of two by its exponent.
            double power;
            const std::uint64_t exponent = static_cast<std::uint64_t>(1023 - 2 * octaves) << 52;
            std::memcpy(&power, &exponent, sizeof power);
            weight_[used_] = static_cast<double>(weights_[at]) * power;
            ++used_;
        }
        for (int bits = 1; bits <= 8; ++bits) errors_[bits] = error_at(bits);
        double uniform = 0.0;
        for (int i = 0; i < used_; ++i) uniform = uniform + weight_[i] * errors_[level_];
        least_bytes_ ? fewest(uniform) : nearest(uniform);
    }

    int bits(float span) const {
        if (is_flat(span)) return 0;
        return uniform_ ? level_ : bits_at(shift_ - depth(span));
    }

  private:
    int depth(float span) const {
        const int below = largest_ - class_of(span);
        return below < classes - 1 ? below : classes - 1;
    }

    // The least shift with little enough error.
    void fewest(double uniform) {
        int low = -1, high = most_shift;
        while (low < high) {
            const int middle = (low + high) >> 1;
            if (error(middle) <= uniform)
                high = middle;
            else
                low = middle + 1;
        }
        shift_ = low;
        uniform_ = groups_at(low) >= varying_ * level_;
    }

    // The largest shift with few enough bytes.
    void nearest(double uniform) {
        int low = -1, high = most_shift;
        while (low < high) {
            const int middle = (low + high + 1) >> 1;
            if (groups_at(middle) <= groups_ * level_)
                low = middle;
            else
                high = middle - 1;
        }
        shift_ = low;
        uniform_ = !(error(low) < uniform);
    }

    double error(int shift) const {
        double total = 0.0;
        for (int i = 0; i < used_; ++i) total = total + weight_[i] * errors_[bits_at(shift - depths_[i])];
        return total;
    }

    std::int64_t groups_at(int shift) const {
        std::int64_t total = 0;
        for (int i = 0; i < used_; ++i) total += counts_[i] * bits_at(shift - depths_[i]);
        return total;
    }

    bool least_bytes_;
    int level_;
    int largest_ = 0, used_ = 0, shift_ = 0;
    bool uniform_ = false;
    std::int64_t groups_ = 0, varying_ = 0;
    double errors_[9];
    std::int64_t weights_[classes], counts_[classes];
    double weight_[classes];
    int depths_[classes];
};

}  // namespace gradcomp::GRADCOMP_BODY
