// Eight codes of a payload: a piece of a bit stream that begins and ends with a byte, or whole 16- or 32-bit
// codes.
#pragma once

#include "common.cuh"

namespace gradcomp::cuda {

// The bytes of an integer, to a place that need not be aligned.
template <class T>
inline void write_bytes(std::uint8_t* p, T x, int bytes) {
    if (bytes == static_cast<int>(sizeof(T)) && aligned(p, sizeof(T))) {
        *reinterpret_cast<T*>(p) = x;
        return;
    }
    for (int i = 0; i < bytes; ++i) p[i] = static_cast<std::uint8_t>(x >> (8 * i));
}

template <class T>
inline T read_bytes(const std::uint8_t* p, int bytes) {
    if (bytes == static_cast<int>(sizeof(T)) && aligned(p, sizeof(T))) return *reinterpret_cast<const T*>(p);
    T x = 0;
    for (int i = 0; i < bytes; ++i) x |= static_cast<T>(p[i]) << (8 * i);
    return x;
}

// Code number `first`, a multiple of eight, and the `count` <= 8 from there on.
template <class Code>
inline void write_codes(std::uint8_t* codes, std::int64_t first, std::int64_t count, int bits,
                        const I32 (&code)[8]) {
    if constexpr (sizeof(Code) == 1) {
        std::uint64_t word = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i < count) word |= static_cast<std::uint64_t>(code[i].v) << (i * bits);
        std::uint8_t* const p = codes + first / 8 * bits;
        const int bytes = static_cast<int>((count * bits + 7) / 8);
        if (bytes == 4)
            write_bytes(p, static_cast<std::uint32_t>(word), 4);
        else
            write_bytes(p, word, bytes);
    } else {
        for (int i = 0; i < 8; ++i)
            if (i < count)
                write_bytes(codes + (first + i) * static_cast<int>(sizeof(Code)),
                            static_cast<Code>(code[i].v), sizeof(Code));
    }
}

template <class Code>
inline void read_codes(const std::uint8_t* codes, std::int64_t first, std::int64_t count, int bits,
                       I32 (&code)[8]) {
    if constexpr (sizeof(Code) == 1) {
        const std::uint8_t* const p = codes + first / 8 * bits;
        const int bytes = static_cast<int>((count * bits + 7) / 8);
        const std::uint64_t word =
            bytes == 4 ? read_bytes<std::uint32_t>(p, 4) : read_bytes<std::uint64_t>(p, bytes);
        const std::uint64_t mask = (std::uint64_t{1} << bits) - 1;
#pragma unroll
        for (int i = 0; i < 8; ++i) code[i] = splat(static_cast<std::int32_t>(word >> (i * bits) & mask));
    } else {
        for (int i = 0; i < 8; ++i)
            code[i] =
                splat(i < count ? static_cast<std::int32_t>(read_bytes<Code>(
                                      codes + (first + i) * static_cast<int>(sizeof(Code)), sizeof(Code)))
                                : 0);
    }
}

// Where the payload of a row has its scale records and its codes.
template <class Class>
struct Payload {
    std::int64_t bucket_size;
    std::int64_t buckets;
    std::int64_t scale_bytes;

    explicit Payload(const Segment& segment)
        : bucket_size(Class::record_bytes > 0 ? segment.bucket_size : 2048),
          buckets((segment.length + bucket_size - 1) / bucket_size),
          scale_bytes(buckets * Class::record_bytes) {}
};

}  // namespace gradcomp::cuda
