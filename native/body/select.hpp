// Selections of the largest magnitudes in one pass over memory.
//
// While the elements go by, those whose magnitude is above a floor are kept as candidates, in order.
// select_top finds a floor in a sample: with great likelihood somewhat more elements than are wanted lie
// above it. When the list gets too long it is cut down to the best so far, and the smallest of these becomes
// the floor. The floor itself is excluded then: elements of the same magnitude that come later lose the tie.
// So any input is selected from exactly, whatever the sample said, except if fewer than wanted were above the
// first floor: then the pass is repeated without one.
#pragma once

#include "encode.hpp"
#include "select_lanes.hpp"
#include "sources.hpp"

namespace gradcomp::GRADCOMP_BODY {

class Candidates {
  public:
    // The `wanted` best of a row are looked for, among magnitudes above the floor.
    Candidates(const CandidateSpace& space, std::int64_t length, std::int64_t wanted, std::int32_t floor)
        : space_(space), wanted_(wanted), limit_(candidate_limit(length, wanted)), floor_(floor) {}

    std::int64_t count() const { return count_; }
    std::int32_t floor() const { return floor_; }
    void restart(std::int32_t floor) {
        count_ = 0;
        floor_ = floor;
    }

    // Add the lanes of the mask; cut_if_long must be called after a block.
    void add(I32 index, I32 bits, std::uint32_t mask) {
        compress(space_.indices + count_, index, mask);
        compress(space_.bits + count_, bits, mask);
        count_ += __builtin_popcount(mask);
    }

    void cut_if_long() {
        if (count_ > limit_) floor_ = static_cast<std::int32_t>(cut());
    }

    // Write the best, at most as many as wanted; returns how many.
    std::int64_t finish(std::uint32_t* indices, float* values) {
        if (count_ > wanted_) cut();
        std::memcpy(indices, space_.indices, static_cast<std::size_t>(count_) * sizeof *indices);
        std::memcpy(values, space_.bits, static_cast<std::size_t>(count_) * sizeof *values);
        return count_;
    }

  private:
    // Keep the best, in order; returns the smallest magnitude among them.
    std::uint32_t cut() {
        const RankedMagnitude last = ranked_magnitude(space_.bits, count_, wanted_);
        const I32 floor = splat(static_cast<std::int32_t>(last.magnitude));
        std::int64_t ties = last.ties;
        const std::int64_t count = count_;
        count_ = 0;
        for (std::int64_t i = 0; i < count; i += lanes) {
            const I32 index = load_widen(space_.indices + i);
            const I32 bits = load_widen(space_.bits + i);
            const I32 magnitude = bits & splat(0x7FFFFFFF);
            const std::uint32_t above = mask_less(floor, magnitude);
            std::uint32_t equal = 0;
            if (ties > 0) {
                equal = ~(above | mask_less(magnitude, floor)) & existing_lanes(count - i);
                while (__builtin_popcount(equal) > ties) equal &= ~(0x80000000U >> __builtin_clz(equal));
                ties -= __builtin_popcount(equal);
            }
            // Never beyond i: what is overwritten has been read.
            add(index, bits, (above & existing_lanes(count - i)) | equal);
        }
        return last.magnitude;
    }

    CandidateSpace space_;
    std::int64_t wanted_;
    std::int64_t limit_;
    std::int64_t count_ = 0;
    std::int32_t floor_;
};

// What a pass over contributions does beside reading them.
struct NoCandidates {
    static std::int32_t floor() { return 0; }
    static void add(I32, I32, std::uint32_t) {}
    static void cut_if_long() {}
};

// Copy a block of contributions to the next residual, raise `largest` to the bits of their magnitudes, and
// list candidates.
template <NextResidual kind, class List>
void sift_block(const float* c, std::int64_t first, std::int64_t count, float* next_residual, List& list,
                I32& largest) {
    // Copies, so that the compiler sees that the stores do not change them.
    List candidates = list;
    I32 largest_here = largest;
    const I32 floor = splat(list.floor());
    I32 index = lane_numbers() + splat(static_cast<std::int32_t>(static_cast<std::uint32_t>(first)));
    const auto sift = [&](F32 x, std::uint32_t exists) {
        const I32 magnitude = magnitude_bits(x);
        largest_here = max(largest_here, magnitude);
        const std::uint32_t mask = mask_above(magnitude, floor) & exists;
        // Where memory is written anyhow, a branch is cheaper than storing nothing.
        if (kind == NextResidual::none || mask != 0) candidates.add(index, as_int(x), mask);
        index = index + splat(std::int32_t{lanes});
    };
    std::int64_t i = 0;
    for (; i + lanes <= count; i += lanes) {
        const F32 x = load(c + i);
        if constexpr (kind == NextResidual::cached) store(next_residual + i, x);
        if constexpr (kind == NextResidual::streamed) stream(next_residual + i, x);
        sift(x, 0xFFFF);
    }
    if (i < count) {
        const auto* rest = reinterpret_cast<const std::uint32_t*>(c) + i;
        sift(as_float(load_part(rest, count - i)), existing_lanes(count - i));
        if constexpr (kind != NextResidual::none)
            std::memcpy(next_residual + i, rest, static_cast<std::size_t>(count - i) * sizeof(float));
    }
    largest = largest_here;
    list = candidates;
    list.cut_if_long();
}

// The first block of a long row ends where a cache line of its next residual begins.
inline std::int64_t first_block(const Segment& segment) {
    const std::uint64_t beyond = segment.next_residual % 64;
    if (segment.length < streaming_length || beyond % sizeof(float) != 0) return block_size;
    return block_size - static_cast<std::int64_t>(beyond / sizeof(float));
}

// Write the contributions to the next residual, and list candidates; returns whether all are finite.
template <class List>
bool sift_contributions(const Segment& segment, const Gradient& source, List& list) {
    alignas(64) float scratch[block_capacity];
    I32 largest = splat(0);
    std::int64_t size = first_block(segment);
    for (std::int64_t first = 0; first < segment.length; first += size, size = block_size) {
        const std::int64_t count = smaller(size, segment.length - first);
        const float* c = source.block(first, count, scratch);
        auto* const next_residual = reinterpret_cast<float*>(segment.next_residual) + first;
        if (segment.length >= streaming_length && aligned_for_stream(next_residual))
            sift_block<NextResidual::streamed>(c, first, count, next_residual, list, largest);
        else
            sift_block<NextResidual::cached>(c, first, count, next_residual, list, largest);
    }
    return reduce_max(largest) < infinity_bits;
}

inline void sift_next_residual(const Segment& segment, Candidates& list) {
    I32 largest = splat(0);
    for (std::int64_t first = 0; first < segment.length; first += block_size) {
        const std::int64_t count = smaller(block_size, segment.length - first);
        sift_block<NextResidual::none>(reinterpret_cast<const float*>(segment.next_residual) + first, first,
                                       count, nullptr, list, largest);
    }
}

// A magnitude that probably at least `wanted` elements are above, and not many more; or one that all are
// above.
inline std::int32_t sampled_floor(const Segment& segment, const Gradient& source, std::int64_t wanted,
                                  std::uint32_t* space) {
    constexpr std::int32_t no_floor = -1;
    const std::int64_t vectors = sampled_vectors(segment.length);
    const std::int64_t size = lanes * vectors;
    const double expected =
        static_cast<double>(wanted) * static_cast<double>(size) / static_cast<double>(segment.length);
    // Neighbours resemble each other, so the margin is wider than independent elements would need.
    const auto rank = static_cast<std::int64_t>(expected + 6 * __builtin_sqrt(expected) + 8);
    if (2 * rank > size) return no_floor;
    // One vector at some place in each of equal parts: a constant distance could meet a pattern of the layer.
    const std::int64_t part = segment.length / vectors;
    const auto place = [&](std::int64_t j) {
        const std::uint64_t fraction = static_cast<std::uint32_t>(j) * 0x9E3779B1U;
        return j * part +
               static_cast<std::int64_t>(fraction * static_cast<std::uint64_t>(part - lanes) >> 32);
    };
    for (std::int64_t j = 0; j < vectors; ++j) {
        alignas(64) float scratch[lanes];
        store_narrow(space + lanes * j, as_int(load(source.block(place(j), lanes, scratch))));
    }
    return static_cast<std::int32_t>(ranked_magnitude(space, size, rank).magnitude) - 1;
}

inline void contribute(const ContributeCall& call) {
    for (std::int64_t row = 0; row < call.table.size(); ++row) {
        const Segment segment = call.table[row];
        const Gradient source(segment, call.factors[row], static_cast<float>(call.decay));
        NoCandidates none;
        if (!sift_contributions(segment, source, none)) call.flags[row] |= 1;
    }
    stream_fence();
}

inline void select_top(const SelectTopCall& call) {
    for (std::int64_t row = 0; row < call.table.size(); ++row) {
        const Segment segment = call.table[row];
        const std::int64_t wanted = call.counts[row];
        const Gradient source(segment, call.factors[row], static_cast<float>(call.decay));
        std::uint32_t* const indices = call.indices + call.offsets[row];
        float* const values = call.values + call.offsets[row];
        NoCandidates none;
        call.found[row] = 0;
        if (wanted == 0) {
            if (!sift_contributions(segment, source, none)) call.flags[row] |= 1;
            continue;
        }
        const std::int32_t least = call.zeros ? -1 : 0;
        const std::int32_t sampled = sampled_floor(segment, source, wanted, call.space.bits);
        const std::int32_t floor = sampled < least ? least : sampled;
        Candidates list(call.space, segment.length, wanted, floor);
        if (!sift_contributions(segment, source, list)) {
            call.flags[row] |= 1;
            if (!call.zeros) continue;
            call.found[row] = wanted;
            for (std::int64_t i = 0; i < wanted; ++i) indices[i] = static_cast<std::uint32_t>(i);
            std::memset(values, 0, static_cast<std::size_t>(wanted) * sizeof(float));
            continue;
        }
        if (list.count() < wanted && floor > least) {
            list.restart(least);
            sift_next_residual(segment, list);
        }
        call.found[row] = list.finish(indices, values);
    }
    stream_fence();
}

inline void select_above(const SelectAboveCall& call) {
    for (std::int64_t row = 0; row < call.table.size(); ++row) {
        const Segment segment = call.table[row];
        const std::int64_t wanted = smaller(call.limits[row], segment.length);
        call.found[row] = 0;
        if (wanted == 0) continue;
        Candidates list(call.space, segment.length, wanted, floor_below(call.thresholds[row]));
        sift_next_residual(segment, list);
        call.found[row] = list.finish(call.indices + call.offsets[row], call.values + call.offsets[row]);
    }
}

}  // namespace gradcomp::GRADCOMP_BODY
