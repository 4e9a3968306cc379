// Eight codes of a payload: a piece of a bit stream that begins and ends with a byte, or whole 16- or 32-bit
// codes. On their way from and to memory they are words, of which the first bytes count.
#pragma once

#include "common.cuh"

namespace gradcomp::cuda {

// What eight codes take at most.
template <class Code>
inline constexpr int words_of_group = 2 * static_cast<int>(sizeof(Code));

template <class Code>
inline int bytes_of(int count, int bits) {
    return sizeof(Code) == 1 ? (count * bits + 7) / 8 : count * static_cast<int>(sizeof(Code));
}

// Where the code of an element is whose number is a multiple of eight.
template <class Code>
inline std::int64_t place_of_codes(std::int64_t first, int bits) {
    return sizeof(Code) == 1 ? first / 8 * bits : first * static_cast<int>(sizeof(Code));
}

template <int n>
inline void write_words(std::uint8_t* p, int bytes, const std::uint32_t (&words)[n]) {
    if (n % 4 == 0 && bytes == 4 * n && aligned(p, 16)) {
#pragma unroll
        for (int j = 0; j + 3 < n; j += 4)
            reinterpret_cast<uint4*>(p)[j / 4] =
                make_uint4(words[j], words[j + 1], words[j + 2], words[j + 3]);
    } else if (bytes % 4 == 0 && aligned(p, 4)) {
#pragma unroll
        for (int j = 0; j < n; ++j)
            if (4 * j < bytes) reinterpret_cast<std::uint32_t*>(p)[j] = words[j];
    } else if (bytes % 2 == 0 && aligned(p, 2)) {
#pragma unroll
        for (int j = 0; j < 2 * n; ++j)
            if (2 * j < bytes)
                reinterpret_cast<std::uint16_t*>(p)[j] =
                    static_cast<std::uint16_t>(words[j / 2] >> (16 * (j % 2)));
    } else {
#pragma unroll
        for (int i = 0; i < 4 * n; ++i)
            if (i < bytes) p[i] = static_cast<std::uint8_t>(words[i / 4] >> (8 * (i % 4)));
    }
}

// What is read once. Of many words nothing is said: compilers would have all their bytes in registers at
// once.
template <int n, class T>
inline T load(const T* p) {
    if constexpr (n > 2)
        return *p;
    else
        return __ldcs(p);
}

// The bytes that do not count are zero.
template <int n>
inline void read_words(const std::uint8_t* p, int bytes, std::uint32_t (&words)[n]) {
    if (n % 4 == 0 && bytes == 4 * n && aligned(p, 16)) {
#pragma unroll
        for (int j = 0; j + 3 < n; j += 4) {
            const uint4 four = load<n>(reinterpret_cast<const uint4*>(p) + j / 4);
            words[j] = four.x, words[j + 1] = four.y, words[j + 2] = four.z, words[j + 3] = four.w;
        }
    } else if (bytes % 4 == 0 && aligned(p, 4)) {
#pragma unroll
        for (int j = 0; j < n; ++j)
            words[j] = 4 * j < bytes ? load<n>(reinterpret_cast<const std::uint32_t*>(p) + j) : 0;
        return;
    }
#pragma unroll
    for (int j = 0; j < n; ++j) words[j] = 0;
    if (bytes % 2 == 0 && aligned(p, 2)) {
#pragma unroll
        for (int j = 0; j < 2 * n; ++j)
            if (2 * j < bytes)
                words[j / 2] |= std::uint32_t{load<n>(reinterpret_cast<const std::uint16_t*>(p) + j)}
                                << (16 * (j % 2));
    } else {
#pragma unroll
        for (int i = 0; i < 4 * n; ++i)
            if (i < bytes) words[i / 4] |= static_cast<std::uint32_t>(load<n>(p + i)) << (8 * (i % 4));
    }
}

// The first `count` <= 8 of some codes, or none, to where they begin.
template <class Code>
inline void write_codes(std::uint8_t* p, int count, int bits, const I32 (&code)[8]) {
    std::uint32_t digit[8], words[words_of_group<Code>];
#pragma unroll
    for (int i = 0; i < 8; ++i) digit[i] = static_cast<std::uint32_t>(code[i].v);
    if (count < group) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i >= count) digit[i] = 0;
    }
    if constexpr (sizeof(Code) == 1) {
        // As digits of two numbers: a multiplication each, where a shift would take another instruction.
        const std::uint32_t base = std::uint32_t{1} << bits;
        std::uint32_t low = digit[3], high = digit[7];
#pragma unroll
        for (int i = 2; i >= 0; --i) {
            low = low * base + digit[i];
            high = high * base + digit[4 + i];
        }
        const std::uint64_t both = low | static_cast<std::uint64_t>(high) << (4 * bits);
        words[0] = static_cast<std::uint32_t>(both), words[1] = static_cast<std::uint32_t>(both >> 32);
    } else {
#pragma unroll
        for (int j = 0; j < words_of_group<Code>; ++j)
            words[j] =
                sizeof(Code) == 4 ? digit[j] : (digit[2 * j % 8] & 0xFFFF) | digit[(2 * j + 1) % 8] << 16;
    }
    write_words(p, bytes_of<Code>(count, bits), words);
}

// Codes as they come from memory: all loads of a thread are under way before the first is looked into.
template <class Code>
struct Packed {
    std::uint32_t words[words_of_group<Code>];

    void read(const std::uint8_t* p, int count, int bits) {
        read_words(p, bytes_of<Code>(count, bits), words);
    }

    void unpack(int bits, I32 (&code)[8]) const {
        if constexpr (sizeof(Code) == 1) {
            const std::uint32_t mask = (std::uint32_t{1} << bits) - 1;
            const std::uint64_t both = words[0] | static_cast<std::uint64_t>(words[1]) << 32;
            const auto low = words[0], high = static_cast<std::uint32_t>(both >> (4 * bits));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                code[i] = splat(static_cast<std::int32_t>(low >> (i * bits) & mask));
                code[4 + i] = splat(static_cast<std::int32_t>(high >> (i * bits) & mask));
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                code[i] = splat(static_cast<std::int32_t>(
                    sizeof(Code) == 4 ? words[i] : words[i / 2] >> (16 * (i % 2)) & 0xFFFF));
        }
    }
};

// One code.
template <class Code>
inline I32 read_code(const std::uint8_t* codes, std::int64_t i, int bits) {
    std::uint32_t code = 0;
    if constexpr (sizeof(Code) == 1) {
        const std::uint8_t* const p = codes + (i * bits >> 3);
        const int shift = static_cast<int>(i * bits & 7);
        code = p[0];
        if (shift + bits > 8) code |= static_cast<std::uint32_t>(p[1]) << 8;
        code = code >> shift & ((std::uint32_t{1} << bits) - 1);
    } else {
        const std::uint8_t* const p = codes + i * static_cast<int>(sizeof(Code));
#pragma unroll
        for (int byte = 0; byte < static_cast<int>(sizeof(Code)); ++byte)
            code |= static_cast<std::uint32_t>(p[byte]) << (8 * byte);
    }
    return splat(static_cast<std::int32_t>(code));
}

// Where the payload of a row has its scale records and its codes.
template <class Class>
struct Payload {
    std::int32_t bucket_size;
    std::int64_t scale_bytes;

    explicit Payload(const Segment& segment)
        : bucket_size(Class::record_bytes > 0 ? segment.bucket_size : 2048),
          scale_bytes((segment.length + bucket_size - 1) / bucket_size * Class::record_bytes +
                      (segment.length > 0 ? unit_bytes<Class> : 0)) {}
};

// Where in a payload the record of a bucket is.
template <class Class>
inline std::int64_t place_of_record(std::int64_t bucket) {
    return unit_bytes<Class> + bucket * Class::record_bytes;
}

// The record of a bucket, as it comes from memory, and the unit of its scales.
template <class Class>
struct Record {
    static constexpr int bytes = static_cast<int>(Class::record_bytes);
    static constexpr int own_words = (bytes + 3) / 4 + (bytes == 0 ? 1 : 0);
    std::uint32_t words[own_words + (unit_bytes<Class> > 0 ? 1 : 0)];

    void read(const std::uint8_t* payload, std::int64_t bucket) {
        if constexpr (bytes > 0) read_words(payload + place_of_record<Class>(bucket), bytes, words);
        if constexpr (unit_bytes<Class> > 0) {
            std::uint32_t unit[1];
            read_words(payload, sizeof unit, unit);
            words[own_words] = unit[0];
        }
    }

    Class codec(Level level) const {
        if constexpr (unit_bytes<Class> > 0)
            level.unit = float_of(static_cast<std::int32_t>(words[own_words]));
        return Class(reinterpret_cast<const std::uint8_t*>(words), level);
    }
};

// What an encoder of a row needs. `largest`: the magnitude that the unit of scales follows from.
template <class Class>
inline Level level_of(const Segment& segment, const float* magnitudes, const float* largest) {
    Level level(segment, magnitudes);
    if constexpr (unit_bytes<Class> > 0) level.unit = Class::unit_for(*largest);
    return level;
}

// A codec from its record.
template <class Class>
inline Class codec_of(const std::uint8_t* payload, std::int64_t bucket, const Level& level) {
    Record<Class> record = {};
    record.read(payload, bucket);
    return record.codec(level);
}

}  // namespace gradcomp::cuda
