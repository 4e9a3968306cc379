// Sums of many elements in double precision, in the order that gradcomp/kernels/reference_sums.py defines:
// chunks of 4096 elements, in each of them sixteen strided lanes, then trees.
#pragma once

#include "../segment.hpp"
#include "simd.hpp"

namespace gradcomp::GRADCOMP_BODY {

inline constexpr std::int64_t chunk_elements = 4096;

// Adds the sums of chunks, which come one after another, as a tree of neighbours: a sum of 2^k chunks waits
// for the next such sum. The binary digits of the number of chunks say which sums wait.
class ChunkTree {
  public:
    ChunkTree() = default;
    // Mostly there is nothing to copy.
    ChunkTree(const ChunkTree& other) { *this = other; }
    ChunkTree& operator=(const ChunkTree& other) {
        chunks_ = other.chunks_;
        for (int level = 0; chunks_ >> level != 0; ++level) waiting_[level] = other.waiting_[level];
        return *this;
    }

    bool empty() const { return chunks_ == 0; }

    void add(double sum) {
        int level = 0;
        for (; (chunks_ >> level & 1) != 0; ++level) sum = waiting_[level] + sum;
        waiting_[level] = sum;
        ++chunks_;
    }

    double total() const {
        double sum = 0.0;
        for (int level = 0; chunks_ >> level != 0; ++level)
            if ((chunks_ >> level & 1) != 0) sum = waiting_[level] + sum;
        return sum;
    }

  private:
    static constexpr int levels = 32;
    static_assert(max_elements / chunk_elements < std::int64_t{1} << levels);

    std::uint32_t chunks_ = 0;
    double waiting_[levels];
};

#ifndef GRADCOMP_CUDA

// A sum of vectors, from the sums of their lanes: LaneSums or SquareSums.
template <class Lanes>
class OrderedSum {
  public:
    void add(F32 x) { lanes_.add(x); }

    // Between one chunk and the next.
    void end_chunk() {
        tree_.add(lane_tree(lanes_));
        lanes_ = Lanes{};
    }

    double total() const {
        const double last = lane_tree(lanes_);
        if (tree_.empty()) return last;
        ChunkTree tree = tree_;
        tree.add(last);
        return tree.total();
    }

  private:
    Lanes lanes_;
    ChunkTree tree_;
};

#else

// The same; what the lanes of a team have added is joined where a chunk ends. A team of half a warp has two
// chunks at most.
template <class Lanes, bool block = (team_threads > 16)>
class OrderedSum {
  public:
    void add(F32 x) { lanes_.add(x); }

    void end_chunk() {
        first_ = lane_tree(lanes_);
        lanes_ = Lanes{};
    }

    double total() const { return __shfl_sync(half_warp_mask(), first_ + lane_tree(lanes_), 0, 16); }

  private:
    Lanes lanes_;
    double first_ = 0.0;
};

// Every half warp of a block has chunks of its own: all end theirs together, the last ones too.
template <class Lanes>
class OrderedSum<Lanes, true> {
  public:
    void add(F32 x) { lanes_.add(x); }

    void end_chunk() {
        tree_.add(tree_of_half_warps<team_threads / 16>(lane_tree(lanes_)));
        lanes_ = Lanes{};
    }

    double total() const { return tree_.total(); }

  private:
    Lanes lanes_;
    ChunkTree tree_;
};

#endif

}  // namespace gradcomp::GRADCOMP_BODY
