// The codes of a segment in its payload, in pieces of any length: a bit stream of bytes, or whole 16- or
// 32-bit codes.
#pragma once

#include "bits.hpp"

namespace gradcomp::GRADCOMP_BODY {

// A block of codes, behind up to seven that wait for their group, and up to a vector of anything beyond it.
template <class Code>
struct CodeBuffer {
    alignas(64) Code codes[8 + block_size + 8 + lanes];
};

// Where codes lie in a payload, if they can be reached there: aligned, and as whole vectors before `end`.
template <class Code>
inline bool in_place(const std::uint8_t* p, std::int64_t count, const std::uint8_t* end) {
    return reinterpret_cast<std::uintptr_t>(p) % alignof(Code) == 0 &&
           whole_vectors(count) * std::int64_t{sizeof(Code)} <= end - p;
}

// Writes codes in order.
template <class Code>
class CodeWriter {
  public:
    CodeWriter(std::uint8_t* out, std::int64_t length, int)
        : out_(out), end_(out + length * std::int64_t{sizeof(Code)}) {}

    // Where the next `count` codes, at most a block, are to be put; a vector more may be.
    Code* room(std::int64_t count) {
        in_place_ = in_place<Code>(out_, count, end_);
        return in_place_ ? reinterpret_cast<Code*>(out_) : buffer_.codes;
    }

    // Take `count` codes from there.
    void append(std::int64_t count) {
        const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(Code);
        if (!in_place_) std::memcpy(out_, buffer_.codes, bytes);
        out_ += bytes;
    }

    void finish() {}

  private:
    std::uint8_t* out_;
    const std::uint8_t* end_;
    bool in_place_ = false;
    CodeBuffer<Code> buffer_;
};

template <>
class CodeWriter<std::uint8_t> {
  public:
    CodeWriter(std::uint8_t* out, std::int64_t length, int bits)
        : stream_(out), end_(out + (length * bits + 7) / 8), bits_(bits), pack_(packers[bits - 1]) {}

    std::uint8_t* room(std::int64_t count) {
        // Codes of eight bits wait for no group.
        in_place_ = bits_ == 8 && in_place<std::uint8_t>(stream_, count, end_);
        return in_place_ ? stream_ : buffer_.codes + pending_;
    }

    void append(std::int64_t count) {
        if (in_place_) {
            stream_ += count;
            return;
        }
        pending_ += count;
        const std::int64_t groups = pending_ / 8;
        if (groups == 0) return;
        pack_(buffer_.codes, groups, stream_, end_);
        stream_ += groups * bits_;
        std::memcpy(buffer_.codes, buffer_.codes + 8 * groups, 8);
        pending_ %= 8;
    }

    // Write the last, incomplete group.
    void finish() {
        std::uint8_t group[8] = {};
        std::uint8_t bytes[8];
        std::memcpy(group, buffer_.codes, static_cast<std::size_t>(pending_));
        pack_(group, 1, bytes, bytes + sizeof bytes);
        std::memcpy(stream_, bytes, static_cast<std::size_t>(end_ - stream_));
    }

  private:
    std::uint8_t* stream_;
    const std::uint8_t* end_;
    int bits_;
    Pack pack_;
    std::int64_t pending_ = 0;
    bool in_place_ = false;
    CodeBuffer<std::uint8_t> buffer_;
};

// Codes first..first+count of a segment, at most a block; a vector beyond them can be read too.
template <class Code>
inline const Code* read_codes(const std::uint8_t* in, const Segment& segment, std::int64_t first,
                              std::int64_t count, CodeBuffer<Code>& buffer) {
    const std::uint8_t* const begin = in + first * std::int64_t{sizeof(Code)};
    if (in_place<Code>(begin, count + lanes, in + segment.length * std::int64_t{sizeof(Code)}))
        return reinterpret_cast<const Code*>(begin);
    std::memcpy(buffer.codes, begin, static_cast<std::size_t>(count) * sizeof(Code));
    std::memset(buffer.codes + count, 0, lanes * sizeof(Code));
    return buffer.codes;
}

template <>
inline const std::uint8_t* read_codes(const std::uint8_t* in, const Segment& segment, std::int64_t first,
                                      std::int64_t count, CodeBuffer<std::uint8_t>& buffer) {
    const std::uint8_t* const end = in + (segment.length * segment.bits + 7) / 8;
    if (segment.bits == 8 && in_place<std::uint8_t>(in + first, count + lanes, end)) return in + first;
    const std::int64_t skipped = first % 8;
    const std::int64_t groups = (skipped + count + 7) / 8;
    std::memset(buffer.codes + 8 * (groups - 1), 0, 8 + lanes);
    unpackers[segment.bits - 1](in + first / 8 * segment.bits, end, groups, buffer.codes);
    return buffer.codes + skipped;
}

}  // namespace gradcomp::GRADCOMP_BODY
