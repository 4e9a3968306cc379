// What a rank has still to move through its rings, and the moving of it, a block at a time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "shm_ring.hpp"
#include "shm_segment.hpp"

namespace gradcomp::shm {

enum class State : std::uint32_t { pending, done, failed };
enum class Number { float32, float64 };

// The chunk of an allreduce that this rank adds: its own part, in place, and what the others send.
struct Sum {
    Number number;
    std::byte* own;
    std::uint64_t length;
    std::uint64_t done = 0;
};

// A message on its way out or in.
struct Transfer {
    int peer;  // this rank itself: out, to all others
    std::byte* data;
    std::uint64_t length;
    Sum* sum = nullptr;   // in: added to it; out: sent as far as it is done
    bool to_all = false;  // in: from the ring that the peer writes for all
    std::uint64_t done = 0;
    bool open = false;  // the header has been moved
};

// A message from this rank to itself.
struct Copy {
    const std::byte* from;
    std::byte* to;
    std::uint64_t length;
    std::uint64_t done = 0;
};

// A collective as this rank sees it. The issuing thread fills it, then only `state` is shared.
struct Operation {
    std::uint64_t collective = 0;
    std::vector<Transfer> sends;
    std::vector<Transfer> receives;
    std::optional<Copy> own;
    std::unique_ptr<Sum> sum;
    std::size_t unfinished = 0;
    std::atomic<State> state{State::pending};
};

// All messages of a ring are moved in the order of the collectives they belong to, on both ends. So the
// earliest collective that is not complete can always go on: nothing waits in a circle, however full the
// rings are.
class Progress {
  public:
    Progress(const Segment& segment, int rank);

    void begin(std::shared_ptr<Operation> operation);
    // Moves at most one block, and no more than `most` bytes, through each ring; false if nothing could be
    // moved.
    bool pass(std::uint64_t most = ~std::uint64_t{0});
    // Tells the others of all that was written and read. To be called before sleeping.
    void announce();
    // Marks all that is not complete as failed.
    void give_up();

    bool idle() const { return operations_.empty(); }
    // Whether something under way needs `rank`.
    bool needs(int rank) const;
    std::uint32_t reasons_to_wake() const;

  private:
    struct Item {
        Operation* operation;
        Transfer* transfer;
    };
    struct Outlet {
        Writer writer;
        std::deque<Item> queue;
        std::uint64_t unannounced = 0;  // bytes that are there, but nobody was told
    };
    struct Inlet {
        Reader reader;
        std::deque<Item> queue;
    };

    bool send(Outlet& outlet, std::uint64_t most);
    bool receive(Inlet& inlet, std::uint64_t most);
    bool add(std::uint64_t most);
    bool open(Inlet& inlet);
    void read(Inlet& inlet, std::uint64_t bytes);
    bool copy();
    void announce(Outlet& outlet);
    void release(Inlet& inlet);
    void finish(Operation& operation);
    Outlet& outlet(int peer) { return outlets_[static_cast<std::size_t>(peer)]; }

    const Segment& segment_;
    int rank_;
    std::uint64_t block_;
    std::deque<std::shared_ptr<Operation>> operations_;
    std::vector<Outlet> outlets_;  // by reader; this rank's own place: to all
    std::vector<Inlet> inlets_;    // rings to this rank, then rings to all; this rank's own stay empty
    std::deque<Sum*> sums_;
    std::deque<Operation*> copies_;
    std::vector<const std::byte*> parts_;
};

}  // namespace gradcomp::shm
