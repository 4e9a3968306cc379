// Sums of many elements in double precision, in the order that gradcomp/kernels/reference_memory.py defines:
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

// The same for at most two chunks.
class ChunkPair {
  public:
    void add(double sum) { sum_ = sum_ + sum; }
    double total() const { return 0.0 + sum_; }

  private:
    double sum_ = -0.0;  // to which anything is added as it is
};

// What a bucket of several chunks needs beside its Range: at most two sums.
using ChunkTrees = ChunkTree[2];
using ChunkPairs = ChunkPair[2];

#ifdef GRADCOMP_CUDA

// In all threads of a team.
template <class Lanes>
inline double sum_of_chunk(const Lanes& lanes) {
    return __shfl_sync(whole_warp, lane_tree(lanes), 0, team_threads);
}

#else

// The compiler's own vector: an instruction set that lacks the width takes several of its registers.
using Doubles8 = double __attribute__((vector_size(64)));

template <class Lanes>
inline double sum_of_chunk(const Lanes& lanes) {
    return lane_tree(lanes);
}

#endif

// A sum of vectors, from the sums of their lanes: LaneSums or SquareSums. One chunk is added as it is; of
// several each is ended, and all are joined then.
template <class Lanes>
class OrderedSum {
  public:
    void add(F32 x) { lanes_.add(x); }

    template <class Tree>
    void end_chunk(Tree& tree) {
        tree.add(sum_of_chunk(lanes_));
        lanes_ = Lanes{};
    }

    template <class Tree>
    void join(const Tree& tree) {
        joined_ = tree.total();
    }

    // One of the two is zero.
    double total() const { return joined_ + sum_of_chunk(lanes_); }

  private:
    Lanes lanes_;
    double joined_ = 0.0;
};

}  // namespace gradcomp::GRADCOMP_BODY
