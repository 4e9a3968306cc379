// Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011): the draws of stochastic rounding, see
// gradcomp/kernels/philox.py.
#pragma once

#include "common.cuh"

namespace gradcomp::cuda {

struct Stream {
    std::uint64_t seed;
    std::uint32_t step, rank;
};

// The four words of a counter.
inline void philox(const Stream& stream, std::uint32_t block, std::uint32_t layer,
                   std::uint32_t (&words)[4]) {
    std::uint32_t c0 = block, c1 = layer, c2 = stream.step, c3 = stream.rank;
    std::uint32_t key0 = static_cast<std::uint32_t>(stream.seed);
    std::uint32_t key1 = static_cast<std::uint32_t>(stream.seed >> 32);
    // A loop, or the keys of all rounds would stay in registers.
#pragma unroll 2
    for (int round = 0; round < 10; ++round) {
        const std::uint32_t low0 = c0 * 0xD2511F53u, high0 = __umulhi(c0, 0xD2511F53u);
        const std::uint32_t low1 = c2 * 0xCD9E8D57u, high1 = __umulhi(c2, 0xCD9E8D57u);
        c0 = high1 ^ c1 ^ key0;
        c1 = low1;
        c2 = high0 ^ c3 ^ key1;
        c3 = low0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// The one draw in (-1/2, 1/2) that moves the lattice of a layer.
inline float shift_of(const Stream& stream, std::uint32_t layer) {
    std::uint32_t words[4];
    philox(stream, 0xFFFFFFFFu, layer, words);
    return static_cast<float>(static_cast<std::int32_t>(words[0] >> 9) * 2 + 1 - (1 << 23)) * 0x1p-24f;
}

// Draws in (0, 1) of the layer's elements first..first+8.
inline void draw(const Stream& stream, std::uint32_t layer, std::int64_t first, float (&u)[8]) {
    std::uint32_t words[8] = {};
    const auto block = static_cast<std::uint32_t>(first / 8);
    const int skipped = static_cast<int>(first % 8);
    // The second time for what layers need that begin elsewhere; one copy of the code does both.
#pragma unroll 1
    for (std::uint32_t k = 0; k < (skipped != 0 ? 2 : 1); ++k) {
        std::uint32_t found[4];
        philox(stream, block + k, layer, found);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (k == 0) words[i] = found[i];
            words[4 + i] = found[i];
        }
    }
    if (skipped != 0) {
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
        u[i] = (static_cast<float>(lane) + draw_offset(stream.step)) * 0x1p-16f;
    }
}

}  // namespace gradcomp::cuda
