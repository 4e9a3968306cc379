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

// Writes codes in order.
template <class Code>
class CodeWriter {
  public:
    CodeWriter(std::uint8_t* out, std::int64_t, int) : out_(out) {}

    // Room for the codes of one block, and a vector more.
    Code* room() { return buffer_.codes; }

    // Take the next `count` codes from room().
    void append(std::int64_t count) {
        const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(Code);
        std::memcpy(out_, buffer_.codes, bytes);
        out_ += bytes;
    }

    void finish() {}

  private:
    std::uint8_t* out_;
    CodeBuffer<Code> buffer_;
};

template <>
class CodeWriter<std::uint8_t> {
  public:
    CodeWriter(std::uint8_t* out, std::int64_t length, int bits)
        : stream_(out), end_(out + (length * bits + 7) / 8), bits_(bits), pack_(packers[bits - 1]) {}

    std::uint8_t* room() { return buffer_.codes + pending_; }

    void append(std::int64_t count) {
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
    CodeBuffer<std::uint8_t> buffer_;
};

// Codes first..first+count of a segment, at most a block; a vector beyond them can be read too.
template <class Code>
inline const Code* read_codes(const std::uint8_t* in, const Segment&, std::int64_t first, std::int64_t count,
                              CodeBuffer<Code>& buffer) {
    std::memcpy(buffer.codes, in + first * std::int64_t{sizeof(Code)},
                static_cast<std::size_t>(count) * sizeof(Code));
    std::memset(buffer.codes + count, 0, lanes * sizeof(Code));
    return buffer.codes;
}

template <>
inline const std::uint8_t* read_codes(const std::uint8_t* in, const Segment& segment, std::int64_t first,
                                      std::int64_t count, CodeBuffer<std::uint8_t>& buffer) {
    const std::uint8_t* end = in + (segment.length * segment.bits + 7) / 8;
    const std::int64_t skipped = first % 8;
    const std::int64_t groups = (skipped + count + 7) / 8;
    std::memset(buffer.codes + 8 * (groups - 1), 0, 8 + lanes);
    unpackers[segment.bits - 1](in + first / 8 * segment.bits, end, groups, buffer.codes);
    return buffer.codes + skipped;
}

}  // namespace gradcomp::GRADCOMP_BODY
