// The two ends of a ring. Positions count bytes since the beginning; each end keeps its own and publishes it.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "shm_segment.hpp"

namespace gradcomp::shm {

// In front of every message, at a multiple of its own size; the bytes follow.
struct alignas(64) MessageHeader {
    std::uint64_t collective;
    std::uint64_t length;
    std::uint64_t check;

    static MessageHeader of(std::uint64_t collective, std::uint64_t length) {
        return {collective, length, mix(collective, length)};
    }
    bool sound() const { return check == mix(collective, length); }

  private:
    static std::uint64_t mix(std::uint64_t collective, std::uint64_t length) {
        return (collective * 0x9e3779b97f4a7c15 ^ length) + 0x67726164636f6d70;
    }
};
static_assert(sizeof(MessageHeader) == 64);

inline std::uint64_t next_message(std::uint64_t position) {
    return (position + sizeof(MessageHeader) - 1) / sizeof(MessageHeader) * sizeof(MessageHeader);
}

class Ring {
  public:
    std::byte* at(std::uint64_t position) const { return bytes_ + (position & (capacity_ - 1)); }
    // Bytes from a position to the end of the memory.
    std::uint64_t contiguous(std::uint64_t position) const {
        return capacity_ - (position & (capacity_ - 1));
    }

  protected:
    Ring(std::byte* bytes, std::uint64_t capacity) : bytes_(bytes), capacity_(capacity) {}

    [[noreturn]] static void refuse(int rank) {
        throw Failure(rank, "rank " + std::to_string(rank) +
                                " holds an impossible place in a ring: the shared "
                                "memory is damaged");
    }

    std::byte* bytes_;
    std::uint64_t capacity_;
};

class Writer : public Ring {
  public:
    Writer(const Segment& segment, int from, int to)
        : Ring(segment.ring(from, to), segment.ring_bytes()), head_(segment.head(from, to)) {
        for (int reader = 0; reader < segment.size(); ++reader) {
            if (from == to ? reader != from : reader == to)
                readers_.push_back({reader, &segment.tail(from, to, reader)});
        }
    }

    std::uint64_t position() const { return position_; }

    // Bytes that may be written behind the position.
    std::uint64_t room() {
        std::uint64_t most = 0;
        for (const Reader& reader : readers_) {
            const std::uint64_t unread = position_ - reader.tail->load(std::memory_order_acquire);
            if (unread > capacity_) refuse(reader.rank);
            most = std::max(most, unread);
        }
        return capacity_ - most;
    }

    void publish(std::uint64_t position) {
        position_ = position;
        head_.store(position, std::memory_order_release);
    }

    template <class Function>
    void for_each_reader(Function function) const {
        for (const Reader& reader : readers_) function(reader.rank);
    }

  private:
    struct Reader {
        int rank;
        const Counter* tail;
    };

    Counter& head_;
    std::vector<Reader> readers_;
    std::uint64_t position_ = 0;
};

class Reader : public Ring {
  public:
    Reader(const Segment& segment, int from, int to, int reader)
        : Ring(segment.ring(from, to), segment.ring_bytes()),
          from_(from),
          head_(segment.head(from, to)),
          tail_(segment.tail(from, to, reader)) {}

    int from() const { return from_; }
    std::uint64_t position() const { return position_; }

    // Bytes that may be read behind the position.
    std::uint64_t available() const {
        const std::uint64_t unread = head_.load(std::memory_order_acquire) - position_;
        if (unread > capacity_) refuse(from_);
        return unread;
    }

    void advance(std::uint64_t position) { position_ = position; }

    std::uint64_t unpublished() const { return position_ - published_; }
    // Lets the writer have what was read.
    void publish() {
        published_ = position_;
        tail_.store(position_, std::memory_order_release);
    }

  private:
    int from_;
    const Counter& head_;
    Counter& tail_;
    std::uint64_t position_ = 0;
    std::uint64_t published_ = 0;
};

}  // namespace gradcomp::shm
