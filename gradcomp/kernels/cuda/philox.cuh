// Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011): the draws of stochastic rounding, see
// gradcomp/kernels/philox.py.
#pragma once

#include "common.cuh"

namespace gradcomp::cuda {

struct Stream {
    std::uint64_t seed;
    std::uint32_t step, rank;
};

// The counters of a layer, which differ in their first word alone: of the first two rounds most is the same
// for all of them, and worked out once.
class Counters {
  public:
    Counters(const Stream& stream, std::uint32_t layer)
        : step_(stream.step),
          key0_(static_cast<std::uint32_t>(stream.seed)),
          key1_(static_cast<std::uint32_t>(stream.seed >> 32)),
          first2_(stream.rank ^ key1_) {
        const std::uint32_t first0 = __umulhi(step_, multiplier1) ^ layer ^ key0_;
        second0_ = step_ * multiplier1 ^ (key0_ + weyl0);
        second2_ = __umulhi(first0, multiplier0) ^ (key1_ + weyl1);
        second3_ = first0 * multiplier0;
    }

    // The four words of the one for eight elements.
    void words(std::uint32_t block, std::uint32_t (&words)[4]) const {
        const std::uint32_t first2 = __umulhi(block, multiplier0) ^ first2_;
        std::uint32_t c0 = __umulhi(first2, multiplier1) ^ second0_, c1 = first2 * multiplier1;
        std::uint32_t c2 = block * multiplier0 ^ second2_, c3 = second3_;
        std::uint32_t key0 = key0_ + 2 * weyl0, key1 = key1_ + 2 * weyl1;
        // A loop of two, or the keys of all rounds would stay in registers.
#pragma unroll 4
        for (int round = 2; round < 10; ++round) {
            const std::uint32_t low0 = c0 * multiplier0, high0 = __umulhi(c0, multiplier0);
            const std::uint32_t low1 = c2 * multiplier1, high1 = __umulhi(c2, multiplier1);
            c0 = high1 ^ c1 ^ key0;
            c1 = low1;
            c2 = high0 ^ c3 ^ key1;
            c3 = low0;
            key0 += weyl0;
            key1 += weyl1;
        }
        words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
    }

    std::uint32_t step() const { return step_; }

  private:
    static constexpr std::uint32_t multiplier0 = 0xD2511F53, multiplier1 = 0xCD9E8D57;
    static constexpr std::uint32_t weyl0 = 0x9E3779B9, weyl1 = 0xBB67AE85;

    std::uint32_t step_, key0_, key1_;
    std::uint32_t first2_;                       // of the first round
    std::uint32_t second0_, second2_, second3_;  // and of the second one
};

// The one draw in (-1/2, 1/2) that moves the lattice of a layer.
inline float shift_of(const Stream& stream, std::uint32_t layer) {
    std::uint32_t words[4];
    Counters(stream, layer).words(0xFFFFFFFFu, words);
    return static_cast<float>(static_cast<std::int32_t>(words[0] >> 9) * 2 + 1 - (1 << 23)) * 0x1p-24f;
}

// Draws in (0, 1) of the layer's elements first..first+8.
inline void draw(const Counters& counters, std::int64_t first, float (&u)[8]) {
    std::uint32_t words[8] = {}, four[4];
    const auto block = static_cast<std::uint32_t>(first / 8);
    const int skipped = static_cast<int>(first % 8);
    counters.words(block, four);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = four[i];
    // What layers need that begin elsewhere.
    if (skipped != 0) {
        counters.words(block + 1, four);
#pragma unroll
        for (int i = 0; i < 4; ++i) words[4 + i] = four[i];
        // Step by step, so that words stay in registers.
#pragma unroll
        for (int i = 0; i < 6; ++i)
            if ((skipped & 4) != 0) words[i] = words[i + 2];
#pragma unroll
        for (int i = 0; i < 5; ++i)
            if ((skipped & 2) != 0) words[i] = words[i + 1];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if ((skipped & 1) != 0) words[i] = words[i] >> 16 | words[i + 1] << 16;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const std::uint32_t lane = words[i / 2] >> (16 * (i % 2)) & 0xFFFF;
        u[i] = (static_cast<float>(lane) + draw_offset(counters.step())) * 0x1p-16f;
    }
}

}  // namespace gradcomp::cuda
