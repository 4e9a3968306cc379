// The bit stream of codes. Eight codes of any width fill whole bytes, so the unit of work is a group of
// eight: as one 64-bit word it holds a code per byte, or its `bits` bytes of stream, and three
// shift-and-merge steps lead from one to the other. (PEXT and PDEP do the same in one instruction, but very
// slowly on some CPUs, and not in vectors.)
#pragma once

#include <cstring>

#include "simd.hpp"

namespace gradcomp::GRADCOMP_BODY {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "payloads are little endian, and copied as they are");

// The low `bits` bits of every `stride`-bit field of a 64-bit word.
constexpr std::uint64_t fields(int bits, int stride) {
    std::uint64_t mask = 0;
    for (int at = 0; at < 64; at += stride) mask |= ((std::uint64_t{1} << bits) - 1) << at;
    return mask;
}

// Of one group, or of each in a vector.
template <int bits, class Word>
inline Word join(Word codes) {
    constexpr std::uint64_t one = fields(bits, 16), two = fields(2 * bits, 32), four = fields(4 * bits, 64);
    codes = (codes & one) | ((codes >> (8 - bits)) & (one << bits));
    codes = (codes & two) | ((codes >> (16 - 2 * bits)) & (two << (2 * bits)));
    return (codes & four) | ((codes >> (32 - 4 * bits)) & (four << (4 * bits)));
}

template <int bits, class Word>
inline Word split(Word stream) {
    constexpr std::uint64_t one = fields(bits, 16), two = fields(2 * bits, 32), four = fields(4 * bits, 64);
    stream = (stream & four) | ((stream << (32 - 4 * bits)) & (four << 32));
    stream = (stream & two) | ((stream << (16 - 2 * bits)) & (two << 16));
    return (stream & one) | ((stream << (8 - bits)) & (one << 8));
}

// The stream of a group as an integer, for widths that fill one.
template <int bits>
struct GroupOf;
template <>
struct GroupOf<1> {
    using Integer = std::uint8_t;
};
template <>
struct GroupOf<2> {
    using Integer = std::uint16_t;
};
template <>
struct GroupOf<4> {
    using Integer = std::uint32_t;
};

inline std::uint64_t load_word(const std::uint8_t* p) {
    std::uint64_t word;
    std::memcpy(&word, p, sizeof word);
    return word;
}

// Words of several groups, which are made together: GCC's and Clang's vectors, on any instruction set.
inline constexpr int batch = 8;
typedef std::uint64_t Batch __attribute__((vector_size(8 * batch)));

// Write the stream of 8 * groups codes, one per byte. No byte at or after `end` is touched.
template <int bits>
inline void pack(const std::uint8_t* codes, std::int64_t groups, std::uint8_t* stream,
                 const std::uint8_t* end) {
    std::int64_t g = 0;
    if constexpr (bits == 1 || bits == 2 || bits == 4) {
        // No group touches its neighbour's bytes: the compiler makes vectors of this.
        for (; g < groups; ++g) {
            const auto group =
                static_cast<typename GroupOf<bits>::Integer>(join<bits>(load_word(codes + 8 * g)));
            std::memcpy(stream + g * bits, &group, bits);
        }
    } else {
        // Whole words while they fit: the next group overwrites what a word has beyond its own bytes.
        for (; g + batch <= groups && end - (stream + (g + batch - 1) * bits) >= 8; g += batch) {
            Batch words;
            std::memcpy(&words, codes + 8 * g, sizeof words);
            words = join<bits>(words);
            for (int i = 0; i < batch; ++i) {
                const std::uint64_t word = words[i];
                std::memcpy(stream + (g + i) * bits, &word, 8);
            }
        }
        for (; g < groups && end - (stream + g * bits) >= 8; ++g) {
            const std::uint64_t word = join<bits>(load_word(codes + 8 * g));
            std::memcpy(stream + g * bits, &word, 8);
        }
        for (; g < groups; ++g) {
            const std::uint64_t word = join<bits>(load_word(codes + 8 * g));
            std::memcpy(stream + g * bits, &word, bits);
        }
    }
}

// Read the codes of `groups` groups, one per byte. No byte at or after `end` is read; what is missing is
// zero.
template <int bits>
inline void unpack(const std::uint8_t* stream, const std::uint8_t* end, std::int64_t groups,
                   std::uint8_t* codes) {
    const std::int64_t bytes = end - stream;
    std::int64_t g = 0;
    if constexpr (bits == 1 || bits == 2 || bits == 4) {
        const std::int64_t whole = smaller(groups, bytes / bits);
        for (; g < whole; ++g) {
            typename GroupOf<bits>::Integer group;
            std::memcpy(&group, stream + g * bits, bits);
            const std::uint64_t word = split<bits>(std::uint64_t{group});
            std::memcpy(codes + 8 * g, &word, 8);
        }
    } else {
        for (; g + batch <= groups && bytes - (g + batch - 1) * bits >= 8; g += batch) {
            Batch words;
            for (int i = 0; i < batch; ++i) words[i] = load_word(stream + (g + i) * bits);
            words = split<bits>(words);
            std::memcpy(codes + 8 * g, &words, sizeof words);
        }
        for (; g < groups && bytes - g * bits >= 8; ++g) {
            const std::uint64_t word = split<bits>(load_word(stream + g * bits));
            std::memcpy(codes + 8 * g, &word, 8);
        }
    }
    for (; g < groups; ++g) {
        std::uint64_t word = 0;
        std::memcpy(&word, stream + g * bits, static_cast<std::size_t>(smaller(bytes - g * bits, bits)));
        word = split<bits>(word);
        std::memcpy(codes + 8 * g, &word, 8);
    }
}

template <>
inline void pack<8>(const std::uint8_t* codes, std::int64_t groups, std::uint8_t* stream,
                    const std::uint8_t*) {
    std::memcpy(stream, codes, static_cast<std::size_t>(8 * groups));
}

template <>
inline void unpack<8>(const std::uint8_t* stream, const std::uint8_t* end, std::int64_t groups,
                      std::uint8_t* codes) {
    std::memcpy(codes, stream, static_cast<std::size_t>(smaller(8 * groups, end - stream)));
}

using Pack = void (*)(const std::uint8_t*, std::int64_t, std::uint8_t*, const std::uint8_t*);
using Unpack = void (*)(const std::uint8_t*, const std::uint8_t*, std::int64_t, std::uint8_t*);
inline constexpr Pack packers[] = {pack<1>, pack<2>, pack<3>, pack<4>, pack<5>, pack<6>, pack<7>, pack<8>};
inline constexpr Unpack unpackers[] = {unpack<1>, unpack<2>, unpack<3>, unpack<4>,
                                       unpack<5>, unpack<6>, unpack<7>, unpack<8>};

}  // namespace gradcomp::GRADCOMP_BODY
