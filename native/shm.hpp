// One rank of a shared-memory transport: the collectives, and the thread that carries them out.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "shm_progress.hpp"
#include "shm_segment.hpp"

namespace gradcomp::shm {

struct Part {
    int peer;
    std::byte* data;  // what is sent is only read
    std::uint64_t length;
};

// Collectives are issued by one thread at a time; their arrays stay until they are complete or the rank is
// closed.
class Rank {
  public:
    // `processes`: of all ranks. Throws Failure if this one cannot see one of them.
    Rank(Segment segment, int rank, std::vector<Process> processes);
    Rank(const Rank&) = delete;
    Rank& operator=(const Rank&) = delete;
    ~Rank();

    using Handle = std::shared_ptr<const Operation>;

    // Sums over ranks in rank order, in place. Every rank adds one chunk and sends it to all.
    Handle allreduce(Number number, std::byte* array, std::uint64_t count);
    // At most one part to and from each rank; own parts are copied.
    Handle exchange(const std::vector<Part>& sends, const std::vector<Part>& receives);
    // One part for each rank, in rank order; this rank's is sent.
    Handle allgather(const std::vector<Part>& parts);

    // Moves the little that can be moved at once; never waits. The thread needs no help, but where all
    // processors are busy it may have to wait for a turn, and small messages with it.
    void help();

    // Why the rank failed; empty if it did not.
    std::string failure();
    // All that is under way fails, here and on the others; does not wait.
    void abandon();
    // Leaves and gives the memory back; waits for no other rank. Idempotent.
    void close();

  private:
    Handle issue(std::shared_ptr<Operation> operation);
    bool move_little();
    bool advance(std::uint64_t most);
    void run();
    void carry_out();
    void check_peers(std::int64_t now_milliseconds);
    void fail(int culprit, const std::string& text);
    void leave(Life life, int culprit);
    void drop_issued();

    Segment segment_;
    const int rank_;
    const std::vector<Process> processes_;

    // Whoever moves bytes holds it. Taken before `mutex_`.
    std::mutex moving_;
    Progress progress_;
    std::int64_t checked_at_ = 0;
    std::vector<std::shared_ptr<Operation>> taken_;

    std::mutex mutex_;  // of these, and of the segment's end
    std::vector<std::shared_ptr<Operation>> issued_;
    std::string failure_;
    std::uint64_t collectives_ = 0;

    std::atomic<bool> stopping_ = false;
    std::atomic<bool> closed_ = false;
    std::thread thread_;
};

}  // namespace gradcomp::shm
