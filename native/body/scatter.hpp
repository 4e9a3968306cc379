// Sparse values of several ranks to a dense mean.
#pragma once

#include "decode.hpp"

namespace gradcomp::GRADCOMP_BODY {

// The lists of one segment, read block by block, from their beginnings on.
class Lists {
  public:
    // `parts` has room for one per rank.
    Lists(const ScatterCall& call, std::int64_t row, ListPart* parts)
        : call_(call), row_(row), parts_(parts) {
        for (std::int64_t rank = 0; rank < call.ranks; ++rank)
            parts[rank].begin = parts[rank].end = call.offsets[list(rank)];
    }

    // The sums, in rank order, of the elements first..first+count, into the array of the calls before.
    void read(std::int64_t first, std::int64_t count, float* sums) {
        clear(sums);
        const std::uint32_t* const indices = call_.indices;
        const float* const values = call_.values;
        for (std::int64_t rank = 0; rank < call_.ranks; ++rank) {
            const std::int64_t end = call_.offsets[list(rank)] + call_.counts[list(rank)];
            std::int64_t at = parts_[rank].end;
            parts_[rank].begin = at;
            for (; at < end && indices[at] < first + count; ++at) sums[indices[at] - first] += values[at];
            parts_[rank].end = at;
        }
        first_ = first;
    }

  private:
    std::int64_t list(std::int64_t rank) const { return rank * call_.table.size() + row_; }

    // Zeros only where a sum was: most of a block has none.
    void clear(float* sums) const {
        if (first_ < 0) {
            std::memset(sums, 0, block_capacity * sizeof(float));
            return;
        }
        for (std::int64_t rank = 0; rank < call_.ranks; ++rank)
            for (std::int64_t at = parts_[rank].begin; at < parts_[rank].end; ++at)
                sums[call_.indices[at] - first_] = 0.0f;
    }

    const ScatterCall& call_;
    std::int64_t row_;
    ListPart* parts_;
    std::int64_t first_ = -1;  // element of the array
};

// Write the mean of a segment's lists; returns whether something is not finite there.
inline bool scatter_segment(const Segment& segment, Lists& lists, const Finish& finish) {
    const std::int32_t largest = write_blocks(
        segment, finish, false,
        [&](std::int64_t first, std::int64_t count, float* values) { lists.read(first, count, values); });
    return largest >= overflow_bits(segment.dtype);
}

}  // namespace gradcomp::GRADCOMP_BODY
