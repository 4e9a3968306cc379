// One block of memory that the ranks of a communicator on one host share; gradcomp/transport/shm.py describes
// it.
//
// Nothing that another process may have written is believed: sizes and places follow from the number of ranks
// and the rings' length, which every rank knows, and each counter is compared with what it can be before it
// is used.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace gradcomp::shm {

// What a transport reports when it cannot go on. `rank` is whose doing it is, for the other ranks to report
// too.
class Failure : public std::runtime_error {
  public:
    Failure(int rank, const std::string& text) : std::runtime_error(text), rank_(rank) {}
    int rank() const { return rank_; }

  private:
    int rank_;
};

// A process, told from a later one with the same number by when it started.
struct Process {
    std::int64_t id;
    std::uint64_t start_ticks;

    static Process self();
    // False once it has ended, be it that nobody has collected it yet.
    bool lives() const;
};

// This process's number, which a forked child has not.
std::int64_t process_number();

enum class Life : std::uint32_t { absent = 0, attached = 1, left = 2, failed = 3 };

using Word = std::atomic<std::uint32_t>;
using Counter = std::atomic<std::uint64_t>;
static_assert(Word::is_always_lock_free && Counter::is_always_lock_free);
static_assert(sizeof(Word) == 4 && sizeof(Counter) == 8);

// Two cache lines: processors fetch them in pairs.
constexpr std::size_t apart = 128;

// What a sleeping rank wants to be woken for.
enum Wake : std::uint32_t { for_anything = 1, for_bytes = 2, for_room = 4 };
// Whatever the slot says: another process may have written it.
constexpr std::uint32_t always = ~0u;

struct alignas(apart) Slot {
    Word life;
    Word culprit;              // once failed: whose doing it was
    alignas(apart) Word bell;  // counts what happened that this rank may be waiting for
    Word asleep;               // reasons to wake it; 0 while it is up
};

struct alignas(apart) Position {
    Counter value;
};

// Where a segment is to be found while its creator keeps it open.
struct Place {
    Process creator;
    int descriptor;
    std::uint64_t nonce;
};

class Segment {
  public:
    // Rank 0's: an anonymous file, which nobody needs to remove.
    static Segment create(int size, std::uint64_t ring_bytes);
    // Everybody else's.
    static Segment attach(const Place& place, int size, std::uint64_t ring_bytes);

    Segment(Segment&& other) noexcept;
    Segment& operator=(Segment&&) = delete;
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;
    ~Segment();

    Place place() const { return place_; }
    // No more ranks will come.
    void shut();
    // Gives the memory back; nothing of it may be touched any more.
    void unmap();

    int size() const { return size_; }
    std::uint64_t ring_bytes() const { return ring_bytes_; }

    Slot& slot(int rank) const;
    // A ring from one rank to another, or (`from` == `to`) from one to all others.
    Counter& head(int from, int to) const;
    // How far rank `reader` has read that ring.
    Counter& tail(int from, int to, int reader) const;
    std::byte* ring(int from, int to) const;

  private:
    Segment(int descriptor, int size, std::uint64_t ring_bytes);
    std::uint64_t pair(int from, int to) const;

    int descriptor_;
    int size_;
    std::uint64_t ring_bytes_;
    Place place_{};
    std::byte* memory_ = nullptr;
};

// Tells a rank that something happened; costs a system call only if it sleeps and wants to be woken for it.
void ring_bell(Slot& slot, std::uint32_t reasons);
// For a rank's other threads: it may sleep, or be about to, and not know of these reasons to be woken.
void add_reasons(Slot& slot, std::uint32_t reasons);
// Sleeps until somebody rings who was not heard yet, for one of the reasons, or at most so long.
void sleep_at_bell(Slot& slot, std::uint32_t heard, std::uint32_t reasons, std::int64_t most_milliseconds);

// Bytes of memory that a segment takes.
std::uint64_t segment_bytes(int size, std::uint64_t ring_bytes);
void check_geometry(int size, std::uint64_t ring_bytes);

}  // namespace gradcomp::shm
