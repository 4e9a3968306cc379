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

template <int bits>
inline std::uint64_t join(std::uint64_t codes) {
    constexpr std::uint64_t one = fields(bits, 16), two = fields(2 * bits, 32), four = fields(4 * bits, 64);
    codes = (codes & one) | ((codes >> (8 - bits)) & (one << bits));
    codes = (codes & two) | ((codes >> (16 - 2 * bits)) & (two << (2 * bits)));
    return (codes & four) | ((codes >> (32 - 4 * bits)) & (four << (4 * bits)));
}

template <int bits>
inline std::uint64_t split(std::uint64_t stream) {
    constexpr std::uint64_t one = fields(bits, 16), two = fields(2 * bits, 32), four = fields(4 * bits, 64);
    stream = (stream & four) | ((stream << (32 - 4 * bits)) & (four << 32));
    stream = (stream & two) | ((stream << (16 - 2 * bits)) & (two << 16));
    return (stream & one) | ((stream << (8 - bits)) & (one << 8));
}

// Groups that are worked on at once, in two loops: the first is vectorised by the compiler, the second only
// moves.
inline constexpr std::int64_t batch_groups = 64;

// Write the stream of 8 * groups codes, one per byte. No byte at or after `end` is touched.
template <int bits>
inline void pack(const std::uint8_t* codes, std::int64_t groups, std::uint8_t* stream,
                 const std::uint8_t* end) {
    while (groups > 0) {
        const std::int64_t batch = smaller(groups, batch_groups);
        std::uint64_t words[batch_groups];
        std::memcpy(words, codes, static_cast<std::size_t>(8 * batch));
        for (std::int64_t g = 0; g < batch; ++g) words[g] = join<bits>(words[g]);
        // Whole words while they fit: the next group overwrites what a word has beyond its own bytes.
        std::int64_t g = 0;
        for (; g < batch && end - stream >= 8; ++g, stream += bits) std::memcpy(stream, &words[g], 8);
        for (; g < batch; ++g, stream += bits) std::memcpy(stream, &words[g], bits);
        codes += 8 * batch;
        groups -= batch;
    }
}

// Read the codes of `groups` groups, one per byte. No byte at or after `end` is read; what is missing is
// zero.
template <int bits>
inline void unpack(const std::uint8_t* stream, const std::uint8_t* end, std::int64_t groups,
                   std::uint8_t* codes) {
    while (groups > 0) {
        const std::int64_t batch = smaller(groups, batch_groups);
        std::uint64_t words[batch_groups];
        std::int64_t g = 0;
        for (; g < batch && end - stream >= 8; ++g, stream += bits) std::memcpy(&words[g], stream, 8);
        for (; g < batch; ++g) {
            words[g] = 0;
            const std::int64_t left = smaller(end - stream, bits);
            std::memcpy(&words[g], stream, static_cast<std::size_t>(left));
            stream += left;
        }
        for (g = 0; g < batch; ++g) words[g] = split<bits>(words[g]);
        std::memcpy(codes, words, static_cast<std::size_t>(8 * batch));
        codes += 8 * batch;
        groups -= batch;
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
