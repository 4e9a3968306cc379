// Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011): the draws of stochastic rounding, see
// gradcomp/kernels/philox.py.
#pragma once

#include <cstring>

#include "../kernels.hpp"
#include "simd.hpp"

namespace gradcomp::GRADCOMP_BODY {

class RandomStream {
  public:
    // Draws before and after the ones asked for, since whole counters are computed, and several at once.
    static constexpr std::int64_t slack = 8 + 8 * Words::lanes + lanes;

    RandomStream(const Rounding& rounding, std::uint32_t layer)
        : layer_(splat_words(layer)), step_(splat_words(rounding.step)), rank_(splat_words(rounding.rank)) {
        auto key0 = static_cast<std::uint32_t>(rounding.seed);
        auto key1 = static_cast<std::uint32_t>(rounding.seed >> 32);
        for (int round = 0; round < rounds; ++round) {
            keys_[round][0] = splat_words(key0);
            keys_[round][1] = splat_words(key1);
            key0 += 0x9E3779B9;
            key1 += 0xBB67AE85;
        }
    }

    // 16 random bits for each of the layer's elements first..first+count. The buffer has room for count +
    // slack; returns where in it the first draw lies.
    const std::uint16_t* draw(std::int64_t first, std::int64_t count, std::uint16_t* buffer) const {
        // A copy that no store can alias: the keys stay in registers.
        const RandomStream stream = *this;
        const auto block = static_cast<std::uint32_t>(first / 8);
        std::uint64_t numbers[Words::lanes];
        for (int lane = 0; lane < Words::lanes; ++lane) numbers[lane] = block + Words::order[lane];
        Words counter = load_words(numbers);
        const Words advance = splat_words(Words::lanes);
        const std::int64_t end = first % 8 + count;
        for (std::int64_t i = 0; i < end; i += 8 * Words::lanes) {
            stream.write_block(counter, buffer + i);
            counter = counter + advance;
        }
        return buffer + first % 8;
    }

  private:
    static constexpr int rounds = 10;

    void write_block(Words counter, std::uint16_t* out) const {
        const Words multiplier0 = splat_words(0xD2511F53);
        const Words multiplier1 = splat_words(0xCD9E8D57);
        Words c0 = counter, c1 = layer_, c2 = step_, c3 = rank_;
        for (int round = 0; round < rounds; ++round) {
            const Words product0 = multiply(c0, multiplier0);
            const Words product1 = multiply(c2, multiplier1);
            c0 = high_word(product1) ^ c1 ^ keys_[round][0];
            c1 = product1;
            c2 = high_word(product0) ^ c3 ^ keys_[round][1];
            c3 = product0;
        }
        store_quads(out, c0, c1, c2, c3);
    }

    Words layer_, step_, rank_;
    Words keys_[rounds][2];
};

// The one draw in (-1/2, 1/2) that moves the lattice of a layer.
inline float shift_of(const Rounding& rounding, std::uint32_t layer) {
    alignas(64) std::uint16_t buffer[8 + RandomStream::slack];
    std::uint32_t word;
    std::memcpy(&word, RandomStream(rounding, layer).draw(max_elements - 8, 2, buffer), sizeof word);
    return static_cast<float>(static_cast<std::int32_t>(word >> 9) * 2 + 1 - (1 << 23)) * 0x1p-24f;
}

}  // namespace gradcomp::GRADCOMP_BODY
