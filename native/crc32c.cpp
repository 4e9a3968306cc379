// CRC-32C by the processor's instruction where there is one. One chain of it waits three cycles for each
// eight bytes, so three chains run side by side.

#include "crc32c.hpp"

#include <array>
#include <cstring>

#include "kernels.hpp"

#ifdef GRADCOMP_X86
#include <nmmintrin.h>
#endif

namespace gradcomp {

namespace {

constexpr std::uint32_t polynomial = 0x82F63B78;  // lowest bit first

using Table = std::array<std::uint32_t, 256>;

// tables[k][b]: the state after byte b and k zero bytes, from state 0.
template <std::size_t count>
constexpr std::array<Table, count> byte_tables() {
    std::array<Table, count> tables{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t state = byte;
        for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1) ? polynomial : 0);
        tables[0][byte] = state;
    }
    for (std::size_t k = 1; k < count; ++k) {
        for (std::size_t byte = 0; byte < 256; ++byte) {
            const std::uint32_t state = tables[k - 1][byte];
            tables[k][byte] = (state >> 8) ^ tables[0][state & 0xFF];
        }
    }
    return tables;
}

constexpr std::array<Table, 8> tables = byte_tables<8>();

std::uint64_t word_at(const std::uint8_t* data) {
    std::uint64_t word = 0;
    std::memcpy(&word, data, sizeof(word));
    return word;
}

#ifdef GRADCOMP_X86

constexpr std::size_t lane_bytes = 1024;

// shift[i][b]: the state b << 8 i after lane_bytes zero bytes. Zero bytes act on a state linearly, so that
// four look-ups and three XORs carry any state over a lane.
const std::array<Table, 4>& lane_shift() {
    static const std::array<Table, 4> shift = [] {
        std::array<std::uint32_t, 32> of_bit{};
        for (std::size_t bit = 0; bit < 32; ++bit) {
            std::uint32_t state = std::uint32_t{1} << bit;
            for (std::size_t i = 0; i < lane_bytes; ++i) state = (state >> 8) ^ tables[0][state & 0xFF];
            of_bit[bit] = state;
        }
        std::array<Table, 4> made{};
        for (std::size_t i = 0; i < 4; ++i) {
            for (std::size_t byte = 0; byte < 256; ++byte) {
                for (std::size_t bit = 0; bit < 8; ++bit)
                    if (byte >> bit & 1) made[i][byte] ^= of_bit[8 * i + bit];
            }
        }
        return made;
    }();
    return shift;
}

std::uint64_t over_lane(const std::array<Table, 4>& shift, std::uint64_t state) {
    return shift[0][state & 0xFF] ^ shift[1][state >> 8 & 0xFF] ^ shift[2][state >> 16 & 0xFF] ^
           shift[3][state >> 24 & 0xFF];
}

// Clang counts the instruction as a feature of its own.
__attribute__((target("sse4.2,crc32"))) std::uint32_t by_instruction(const std::uint8_t* data,
                                                                     std::size_t size, std::uint32_t value) {
    std::uint64_t state = ~value;
    if (size >= 3 * lane_bytes) {
        const std::array<Table, 4>& shift = lane_shift();
        for (; size >= 3 * lane_bytes; data += 3 * lane_bytes, size -= 3 * lane_bytes) {
            std::uint64_t second = 0;
            std::uint64_t third = 0;
            for (std::size_t at = 0; at < lane_bytes; at += 8) {
                state = _mm_crc32_u64(state, word_at(data + at));
                second = _mm_crc32_u64(second, word_at(data + lane_bytes + at));
                third = _mm_crc32_u64(third, word_at(data + 2 * lane_bytes + at));
            }
            state = over_lane(shift, over_lane(shift, state) ^ second) ^ third;
        }
    }
    for (; size >= 8; data += 8, size -= 8) state = _mm_crc32_u64(state, word_at(data));
    auto rest = static_cast<std::uint32_t>(state);
    for (; size > 0; ++data, --size) rest = _mm_crc32_u8(rest, *data);
    return ~rest;
}

#endif

std::uint32_t by_table(const std::uint8_t* data, std::size_t size, std::uint32_t value) {
    std::uint32_t state = ~value;
    for (; size >= 8; data += 8, size -= 8) {
        const std::uint64_t word = word_at(data) ^ state;
        state = 0;
        for (std::size_t i = 0; i < 8; ++i) state ^= tables[7 - i][word >> 8 * i & 0xFF];
    }
    for (; size > 0; ++data, --size) state = (state >> 8) ^ tables[0][(state ^ *data) & 0xFF];
    return ~state;
}

}  // namespace

std::uint32_t crc32c(const std::uint8_t* data, std::size_t size, std::uint32_t value) {
#ifdef GRADCOMP_X86
    // What has AVX2 has the instruction.
    if (active_kernels().isa != "baseline") return by_instruction(data, size, value);
#endif
    return by_table(data, size, value);
}

}  // namespace gradcomp
