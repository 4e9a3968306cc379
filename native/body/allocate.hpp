// Bits by quantisation bucket: how many bits each bucket of a segment takes.
// gradcomp/kernels/reference_bits.py defines the choice; see there for the words.
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

inline std::int64_t groups_of(std::int64_t values) {
    return (values + 7) / 8;
}

// The ranges of a segment by class, from the largest one's down. Sums are of whole numbers: buckets may come
// in any order.
struct Histogram {
    int largest;
    std::int64_t groups, varying;  // of all buckets, and of those that are not flat
    std::int64_t weights[classes], counts[classes];

    int depth(float span) const {
        const int below = largest - class_of(span);
        return below < classes - 1 ? below : classes - 1;
    }

    static std::int64_t weight(float span, std::int64_t groups) {
        const std::int64_t mantissa = ((bits_of(span) & 0x7FFFFF) | 0x800000) >> 11;
        return groups * mantissa * mantissa;
    }
};

// The choice for one segment.
class Allocation {
  public:
    // Not all buckets are flat. The histogram's counts are used up.
    void choose(Codec codec, int level, Histogram& histogram) {
        largest_ = histogram.largest;
        counts_ = histogram.counts;
        for (int at = 0; at < classes; ++at) {
            if (histogram.counts[at] == 0) continue;
            const int octaves = (largest_ >> 5) - ((largest_ - at) >> 5);
            // A power of two by its exponent.
            const double power =
                __builtin_bit_cast(double, static_cast<std::uint64_t>(1023 - 2 * octaves) << 52);
            weights_[used_] = at == classes - 1 ? 0.0 : static_cast<double>(histogram.weights[at]) * power;
            counts_[used_] = histogram.counts[at];
            depths_[used_] = static_cast<std::int16_t>(at);
            ++used_;
        }
        for (int bits = 1; bits <= 8; ++bits) errors_[bits] = error_at(bits);
        double uniform = 0.0;
        for (int i = 0; i < used_; ++i) uniform = uniform + weights_[i] * errors_[level];
        if (codec == Codec::minmax_least_bytes)
            take_least_bytes(uniform, histogram.varying * level);
        else
            take_least_error(uniform, histogram.groups * level);
    }

    int shift() const { return shift_; }
    bool uniform() const { return uniform_; }

  private:
    // The least shift with little enough error.
    void take_least_bytes(double uniform, std::int64_t bytes) {
        int low = -1, high = most_shift;
        while (low < high) {
            const int middle = (low + high) >> 1;
            if (error(middle) <= uniform)
                high = middle;
            else
                low = middle + 1;
        }
        shift_ = low;
        uniform_ = bytes_at(low) >= bytes;
    }

    // The largest shift with few enough bytes.
    void take_least_error(double uniform, std::int64_t bytes) {
        int low = -1, high = most_shift;
        while (low < high) {
            const int middle = (low + high + 1) >> 1;
            if (bytes_at(middle) <= bytes)
                low = middle;
            else
                high = middle - 1;
        }
        shift_ = low;
        uniform_ = !(error(low) < uniform);
    }

    double error(int shift) const {
        double total = 0.0;
        for (int i = 0; i < used_; ++i) total = total + weights_[i] * errors_[bits_at(shift - depths_[i])];
        return total;
    }

    std::int64_t bytes_at(int shift) const {
        std::int64_t total = 0;
        for (int i = 0; i < used_; ++i) total += counts_[i] * bits_at(shift - depths_[i]);
        return total;
    }

    int largest_ = 0, used_ = 0, shift_ = 0;
    bool uniform_ = false;
    std::int64_t* counts_;
    double errors_[9];
    double weights_[classes];
    std::int16_t depths_[classes];
};

// Bits of one bucket.
inline int bits_of_bucket(const Histogram& histogram, int shift, bool uniform, int level, float span) {
    if (is_flat(span)) return 0;
    return uniform ? level : bits_at(shift - histogram.depth(span));
}

}  // namespace gradcomp::GRADCOMP_BODY
