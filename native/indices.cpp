#include "indices.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

namespace gradcomp {

// Words of a bit stream, and RAW, are read and written as they lie in memory.
static_assert(std::endian::native == std::endian::little);

namespace {

constexpr std::int64_t max_indexed = std::int64_t{1} << 32;

void require(bool condition, std::int64_t row, const char* complaint) {
    if (!condition) throw std::invalid_argument("row " + std::to_string(row) + ": " + complaint);
}

std::int64_t whole_bytes(std::int64_t bits) {
    return (bits + 7) / 8;
}

// The parts of PACKED, for a row with indices.
struct PackedLayout {
    explicit PackedLayout(const IndexRow& list)
        : low_bits(static_cast<int>(std::bit_width(static_cast<std::uint64_t>(list.length / list.count))) -
                   1),
          lower_bits(list.count * low_bits),
          upper_bits(list.count + ((list.length - 1) >> low_bits) + 1) {}

    std::int64_t bytes() const { return whole_bytes(lower_bits) + whole_bytes(upper_bits); }

    int low_bits;  // of one index
    std::int64_t lower_bits, upper_bits;
};

std::int64_t index_bytes(const IndexRow& list) {
    if (list.count == 0) return 0;
    switch (list.coding) {
        case Coding::raw:
            return 4 * list.count;
        case Coding::packed:
            return PackedLayout(list).bytes();
        case Coding::bitmap:
            return whole_bytes(list.length);
        default:
            return 0;
    }
}

// Up to eight bytes; zeros stand for those that do not exist.
std::uint64_t load_word(const std::uint8_t* bytes, std::int64_t available) {
    std::uint64_t word = 0;
    if (available >= 8)
        std::memcpy(&word, bytes, 8);
    else
        std::memcpy(&word, bytes, static_cast<std::size_t>(available));
    return word;
}

// Writes bits one word at a time, low bits first.
class BitWriter {
  public:
    explicit BitWriter(std::uint8_t* out) : out_(out) {}

    // At most 32 bits; those above them are zero.
    void append(std::uint64_t bits, int count) {
        word_ |= bits << used_;
        used_ += count;
        if (used_ >= 64) {
            flush(8);
            used_ -= 64;
            word_ = bits >> (count - used_);
        }
    }

    // The padding up to a byte is zero.
    void finish() { flush((used_ + 7) / 8); }

  private:
    void flush(int bytes) {
        std::memcpy(out_, &word_, static_cast<std::size_t>(bytes));
        out_ += bytes;
    }

    std::uint8_t* out_;
    std::uint64_t word_ = 0;
    int used_ = 0;
};

// Write `bits` bits of which those at position(0), position(1), ... are set; positions ascend.
template <class Position>
void write_set_bits(std::uint8_t* out, std::int64_t bits, std::int64_t count, Position position) {
    std::uint64_t word = 0;
    std::int64_t begin = 0;  // of the word
    const auto flush = [&] {
        const std::int64_t bytes = std::min<std::int64_t>(whole_bytes(bits - begin), 8);
        std::memcpy(out + begin / 8, &word, static_cast<std::size_t>(bytes));
        word = 0;
        begin += 64;
    };
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t at = position(i);
        while (at >= begin + 64) flush();
        word |= std::uint64_t{1} << (at - begin);
    }
    while (begin < bits) flush();
}

// Call found(position) for each of `count` set bits; false if there is another number of them, or padding is
// set.
template <class Found>
bool read_set_bits(const std::uint8_t* in, std::int64_t bits, std::int64_t count, Found found) {
    const std::int64_t bytes = whole_bytes(bits);
    std::int64_t left = count;
    std::int64_t last = -1;
    for (std::int64_t begin = 0; begin < bits; begin += 64) {
        for (std::uint64_t word = load_word(in + begin / 8, bytes - begin / 8); word != 0; word &= word - 1) {
            if (left-- == 0) return false;
            last = begin + std::countr_zero(word);
            found(last);
        }
    }
    return left == 0 && last < bits;
}

void encode_packed(const IndexRow& list, const std::uint32_t* indices, std::uint8_t* payload) {
    const PackedLayout layout(list);
    const int l = layout.low_bits;
    if (l > 0) {
        const std::uint64_t mask = (std::uint64_t{1} << l) - 1;
        BitWriter lower(payload);
        for (std::int64_t i = 0; i < list.count; ++i) lower.append(indices[i] & mask, l);
        lower.finish();
    }
    write_set_bits(payload + whole_bytes(layout.lower_bits), layout.upper_bits, list.count,
                   [&](std::int64_t i) { return (std::int64_t{indices[i]} >> l) + i; });
}

// Whether the bytes are those of a list.
bool decode_packed(const IndexRow& list, const std::uint8_t* payload, std::uint32_t* indices) {
    const PackedLayout layout(list);
    const int l = layout.low_bits;
    const std::int64_t lower_bytes = whole_bytes(layout.lower_bits);
    const int used = static_cast<int>(layout.lower_bits % 8);  // bits of the last byte
    if (used != 0 && payload[lower_bytes - 1] >> used != 0) return false;

    const std::uint64_t mask = (std::uint64_t{1} << l) - 1;
    const std::int64_t bytes = layout.bytes();
    std::int64_t i = 0;
    std::int64_t previous = -1;
    bool ascending = true;
    const bool complete =
        read_set_bits(payload + lower_bytes, layout.upper_bits, list.count, [&](std::int64_t position) {
            // A word from any bit of its first byte on holds the up to 32 bits.
            const std::int64_t bit = i * l;
            const std::uint64_t low = load_word(payload + bit / 8, bytes - bit / 8) >> (bit % 8) & mask;
            const std::int64_t index = ((position - i) << l) + static_cast<std::int64_t>(low);
            ascending &= index > previous;
            previous = index;
            indices[i++] = static_cast<std::uint32_t>(index);
        });
    return complete && ascending && previous < list.length;
}

void encode_row(const IndexRow& list, const std::uint32_t* indices, std::uint8_t* payload) {
    switch (list.coding) {
        case Coding::raw:
            std::memcpy(payload, indices, static_cast<std::size_t>(4 * list.count));
            break;
        case Coding::packed:
            encode_packed(list, indices, payload);
            break;
        case Coding::bitmap:
            write_set_bits(payload, list.length, list.count,
                           [&](std::int64_t i) { return std::int64_t{indices[i]}; });
            break;
        case Coding::all:
            break;
    }
}

void decode_row(std::int64_t row, const IndexRow& list, const std::uint8_t* payload, std::uint32_t* indices) {
    switch (list.coding) {
        case Coding::raw:
            std::memcpy(indices, payload, static_cast<std::size_t>(4 * list.count));
            check_ascending(row, indices, list.count, list.length);
            break;
        case Coding::packed:
            require(decode_packed(list, payload, indices), row, "the bytes are no packed list of indices");
            break;
        case Coding::bitmap:
            require(read_set_bits(
                        payload, list.length, list.count,
                        [&](std::int64_t position) { *indices++ = static_cast<std::uint32_t>(position); }),
                    row, "the bytes are no bitmap of that many indices");
            break;
        case Coding::all:
            for (std::int64_t i = 0; i < list.count; ++i) indices[i] = static_cast<std::uint32_t>(i);
            break;
    }
}

}  // namespace

void check_index_row(std::int64_t row, const IndexRow& list, std::int64_t indices,
                     std::int64_t payload_bytes) {
    require(list.coding >= Coding::raw && list.coding <= Coding::all, row, "unknown coding");
    require(list.length >= 0 && list.length <= max_indexed, row, "length is not in 0..2**32");
    require(list.count >= 0 && list.count <= list.length, row, "count is not in 0..length");
    require(list.coding != Coding::all || list.count == list.length || list.count == 0, row,
            "coding ALL leaves out elements");
    // Written as differences: the sum of a hostile offset and a size could wrap.
    require(list.offset >= 0 && list.offset <= indices - list.count, row,
            "the list does not lie inside indices");
    require(list.place >= 0 && list.place <= payload_bytes - index_bytes(list), row,
            "the row does not lie inside the payload");
}

void check_ascending(std::int64_t row, const std::uint32_t* indices, std::int64_t count,
                     std::int64_t length) {
    std::uint32_t wrong = 0;  // of the items' type, so that the loop becomes one over vectors
    for (std::int64_t i = 1; i < count; ++i) wrong |= indices[i - 1] >= indices[i];
    require(wrong == 0, row, "indices are not ascending");
    require(count == 0 || indices[count - 1] < length, row, "an index is not below the length");
}

void encode_indices(const EncodeIndicesCall& call) {
    for (std::int64_t row = 0; row < call.table.rows; ++row) {
        const IndexRow list = call.table[row];
        if (list.count == 0) continue;
        const std::uint32_t* const indices = call.indices + list.offset;
        check_ascending(row, indices, list.count, list.length);
        encode_row(list, indices, call.payload + list.place);
    }
}

void decode_indices(const DecodeIndicesCall& call) {
    for (std::int64_t row = 0; row < call.table.rows; ++row) {
        const IndexRow list = call.table[row];
        if (list.count == 0) continue;
        decode_row(row, list, call.payload + list.place, call.indices + list.offset);
    }
}

}  // namespace gradcomp
