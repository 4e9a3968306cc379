// Sums over a layer that thresholds are fitted to.
#pragma once

#include "select_lanes.hpp"
#include "sources.hpp"
#include "sums.hpp"

namespace gradcomp::GRADCOMP_BODY {

inline double squares_of_doubles(const Segment& segment) {
    const auto* gradient = reinterpret_cast<const std::uint8_t*>(segment.gradient);
    ChunkTree tree;
    for (std::int64_t begin = 0; begin < segment.length; begin += chunk_elements) {
        const std::int64_t end = smaller(begin + chunk_elements, segment.length);
        Doubles8 sums[2] = {};
        const auto add = [&](const std::uint8_t* p) {
            for (int half = 0; half < 2; ++half) {
                Doubles8 x;
                std::memcpy(&x, p + half * sizeof x, sizeof x);
                sums[half] += x * x;
            }
        };
        std::int64_t i = begin;
        for (; i + lanes <= end; i += lanes) add(gradient + 8 * i);
        std::uint8_t rest[8 * lanes] = {};
        std::memcpy(rest, gradient + 8 * i, static_cast<std::size_t>(8 * (end - i)));
        add(rest);
        double lane[lanes];
        std::memcpy(lane, sums, sizeof lane);
        tree.add(lane_tree(lane));
    }
    return tree.total();
}

inline double squares_of_floats(Segment segment) {
    segment.residual = 0;
    const Gradient source(segment, 1.0f, 0.0f);
    alignas(64) float scratch[block_capacity];
    ChunkTree tree;
    for (std::int64_t begin = 0; begin < segment.length; begin += chunk_elements) {
        const std::int64_t end = smaller(begin + chunk_elements, segment.length);
        SquareSums sums;
        for (std::int64_t first = begin; first < end; first += block_size) {
            const std::int64_t count = smaller(block_size, end - first);
            const float* g = source.block(first, count, scratch);
            for (std::int64_t i = 0; i < count; i += lanes) sums.add(load(g + i));
        }
        tree.add(lane_tree(sums));
    }
    return tree.total();
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
        const auto* next_residual = reinterpret_cast<const std::uint32_t*>(segment.next_residual);
        const I32 floor = splat(floor_below(call.thresholds[row]));
        ChunkTree sum, squares;
        I32 largest = splat(0);
        std::int64_t count = 0;
        for (std::int64_t begin = 0; begin < segment.length; begin += chunk_elements) {
            const std::int64_t end = smaller(begin + chunk_elements, segment.length);
            LaneSums sums;
            SquareSums squared;
            for (std::int64_t i = begin; i < end; i += lanes) {
                const I32 magnitude = load_part(next_residual + i, end - i) & splat(0x7FFFFFFF);
                const I32 chosen =
                    magnitude & less(floor, magnitude) & less(magnitude, splat(infinity_bits + 1));
                sums.add(as_float(chosen));
                squared.add(as_float(chosen));
                largest = max(largest, chosen);
                count += __builtin_popcount(mask_above(magnitude, floor) & existing_lanes(end - i));
            }
            sum.add(lane_tree(sums));
            squares.add(lane_tree(squared));
        }
        call.counts[row] = count;
        call.sums[row] = sum.total();
        call.squares[row] = squares.total();
        call.maxima[row] = __builtin_bit_cast(float, reduce_max(largest));
    }
}

}  // namespace gradcomp::GRADCOMP_BODY
