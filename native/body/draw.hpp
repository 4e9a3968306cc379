// Random indices, see gradcomp/kernels/philox.py.
#pragma once

#include <cstring>

#include "philox.hpp"

namespace gradcomp::GRADCOMP_BODY {

inline void draw_row(const RandomStream& random, std::uint64_t length, std::int64_t count,
                     std::uint32_t* indices) {
    constexpr std::int64_t words = 1024;  // at a time: a whole number of counters
    alignas(64) std::uint16_t buffer[2 * words + RandomStream::slack];
    const auto k = static_cast<std::uint64_t>(count);
    // A stratum ends at floor((j + 1) n / k): one division, whose remainders add up to further elements.
    const std::uint64_t quotient = length / k, remainder = length % k;
    std::uint64_t first = 0, over = 0;
    for (std::int64_t done = 0; done < count; done += words) {
        const std::int64_t now = smaller(words, count - done);
        const std::uint16_t* const drawn = random.draw(2 * done, 2 * now, buffer);
        for (std::int64_t i = 0; i < now; ++i) {
            std::uint32_t word;
            std::memcpy(&word, drawn + 2 * i, sizeof word);
            over += remainder;
            const bool carried = over >= k;
            const std::uint64_t size = quotient + carried;
            over -= carried ? k : 0;
            indices[done + i] = static_cast<std::uint32_t>(first + (word * size >> 32));
            first += size;
        }
    }
}

inline void draw_indices(const DrawIndicesCall& call) {
    for (std::int64_t row = 0; row < call.rows; ++row) {
        if (call.counts[row] == 0) continue;
        draw_row(RandomStream(call.rounding, call.layers[row]), static_cast<std::uint64_t>(call.lengths[row]),
                 call.counts[row], call.indices + call.offsets[row]);
    }
}

}  // namespace gradcomp::GRADCOMP_BODY
