// Sums over a layer that thresholds are fitted to.
#pragma once

#include "select_lanes.hpp"
#include "sources.hpp"

namespace gradcomp::GRADCOMP_BODY {

inline double squares_of_doubles(const Segment& segment) {
    const auto* gradient = reinterpret_cast<const std::uint8_t*>(segment.gradient);
    double lane[lanes] = {};
    for (std::int64_t i = 0; i < segment.length; ++i) {
        double x;
        std::memcpy(&x, gradient + 8 * i, sizeof x);
        lane[i % lanes] += x * x;
    }
    struct Lanes {
        const double (&lane)[lanes];
        void store(double (&out)[lanes]) const { std::memcpy(out, lane, sizeof out); }
    };
    return total(Lanes{lane});
}

inline double squares_of_floats(Segment segment) {
    segment.residual = 0;
    const Gradient source(segment, 1.0f, 0.0f);
    alignas(64) float scratch[block_room];
    SquareSums sums;
    for (std::int64_t first = 0; first < segment.length; first += block_size) {
        const std::int64_t count = smaller(block_size, segment.length - first);
        const float* g = source.block(first, count, scratch);
        for (std::int64_t i = 0; i < count; i += lanes) sums.add(load(g + i));
    }
    return total(sums);
}

inline void squares(const SquaresCall& call) {
    for (std::int64_t row = 0; row < call.table.size(); ++row) {
        const Segment segment = call.table[row];
        if (segment.gradient == 0)
            call.out[row] = 0.0;
        else
            call.out[row] =
                segment.dtype == Dtype::float64 ? squares_of_doubles(segment) : squares_of_floats(segment);
    }
}

inline void tail(const TailCall& call) {
    for (std::int64_t row = 0; row < call.table.size(); ++row) {
        const Segment segment = call.table[row];
        const auto* shadow = reinterpret_cast<const std::uint32_t*>(segment.shadow);
        const I32 floor = splat(floor_below(call.thresholds[row]));
        LaneSums sums;
        SquareSums squared;
        I32 largest = splat(0);
        std::int64_t count = 0;
        for (std::int64_t i = 0; i < segment.length; i += lanes) {
            const I32 magnitude = load_part(shadow + i, segment.length - i) & splat(0x7FFFFFFF);
            const I32 chosen = magnitude & less(floor, magnitude) & less(magnitude, splat(infinity_bits + 1));
            sums.add(as_float(chosen));
            squared.add(as_float(chosen));
            largest = max(largest, chosen);
            count += __builtin_popcount(mask_above(magnitude, floor) & existing_lanes(segment.length - i));
        }
        call.counts[row] = count;
        call.sums[row] = total(sums);
        call.squares[row] = total(squared);
        call.maxima[row] = __builtin_bit_cast(float, reduce_max(largest));
    }
}

}  // namespace gradcomp::GRADCOMP_BODY
