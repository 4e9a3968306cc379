// The collectives of shared memory, and their thread.

#include "shm.hpp"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cfenv>
#include <chrono>

namespace gradcomp::shm {

namespace {

// How often a rank that waits looks whether the others live; how long it may sleep through a bell that went
// wrong.
constexpr std::int64_t check_milliseconds = 100;
// What a caller moves at once, through each ring: less than a microsecond.
constexpr std::uint64_t little = 4096;
// Chunks of an allreduce begin at cache lines of the array, if the array does.
constexpr std::uint64_t chunk_items = 16;

// A caller's thread may round otherwise than the sums are defined.
class DefaultRounding {
  public:
    DefaultRounding() {
        std::fegetenv(&callers_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultRounding() { std::fesetenv(&callers_); }
    DefaultRounding(const DefaultRounding&) = delete;
    DefaultRounding& operator=(const DefaultRounding&) = delete;

  private:
    std::fenv_t callers_;
};

std::int64_t milliseconds() {
    return std::chrono::duration_cast<std::chrono::milliseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

}  // namespace

Rank::Rank(Segment segment, int rank, std::vector<Process> processes)
    : segment_(std::move(segment)), rank_(rank), processes_(std::move(processes)), progress_(segment_, rank) {
    segment_.shut();
    segment_.slot(rank_).life.store(static_cast<std::uint32_t>(Life::attached), std::memory_order_release);
    for (int peer = 0; peer < segment_.size(); ++peer) {
        if (processes_[static_cast<std::size_t>(peer)].lives()) continue;
        const std::string text = "rank " + std::to_string(peer) + " has ended, or rank " +
                                 std::to_string(rank_) + " cannot see its process";
        leave(Life::failed, peer);
        throw Failure(peer, text);
    }
    // Signals are for Python's main thread.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        thread_ = std::thread(&Rank::run, this);
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        leave(Life::failed, rank_);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Rank::~Rank() {
    close();
}

void Rank::leave(Life life, int culprit) {
    Slot& slot = segment_.slot(rank_);
    slot.culprit.store(static_cast<std::uint32_t>(culprit), std::memory_order_relaxed);
    slot.life.store(static_cast<std::uint32_t>(life), std::memory_order_release);
    for (int peer = 0; peer < segment_.size(); ++peer) {
        if (peer != rank_) ring_bell(segment_.slot(peer), for_anything);
    }
}

// The first failure is the one that counts: what follows is its consequence.
void Rank::fail(int culprit, const std::string& text) {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) return;
    failure_ = text;
    leave(Life::failed, culprit);
}

std::string Rank::failure() {
    const std::lock_guard lock(mutex_);
    return failure_;
}

void Rank::abandon() {
    if (stopping_.exchange(true)) return;
    fail(rank_, "rank " + std::to_string(rank_) + " gave up");
    const std::lock_guard lock(mutex_);
    if (!closed_) ring_bell(segment_.slot(rank_), always);
}

void Rank::close() {
    if (closed_.exchange(true)) return;
    stopping_ = true;
    ring_bell(segment_.slot(rank_), always);
    if (thread_.joinable()) thread_.join();
    drop_issued();
    const std::scoped_lock locks(moving_, mutex_);
    if (failure_.empty()) {
        failure_ = "the transport is closed";
        leave(Life::left, rank_);
    }
    segment_.unmap();
}

// Nobody will take them.
void Rank::drop_issued() {
    const std::lock_guard lock(mutex_);
    for (const auto& operation : issued_) operation->state.store(State::failed, std::memory_order_release);
    issued_.clear();
}

Rank::Handle Rank::issue(std::shared_ptr<Operation> operation) {
    {
        const std::lock_guard lock(mutex_);
        operation->collective = collectives_++;
        if (!failure_.empty()) {
            operation->state.store(State::failed, std::memory_order_release);
            return operation;
        }
        issued_.push_back(operation);
    }
    if (!move_little()) {
        const std::lock_guard lock(mutex_);
        if (failure_.empty()) ring_bell(segment_.slot(rank_), for_anything);
    }
    return operation;
}

void Rank::help() {
    move_little();
}

// False if there may be more to move now, and the thread has to.
bool Rank::move_little() {
    const std::unique_lock lock(moving_, std::try_to_lock);
    if (!lock || stopping_) return false;
    const DefaultRounding rounding;
    try {
        const std::uint32_t before = progress_.reasons_to_wake();
        bool moved = advance(little);
        if (moved) moved = progress_.pass(little);  // a sum that is complete goes out
        progress_.announce();
        const std::uint32_t after = progress_.reasons_to_wake();
        if ((after & ~before) == 0) return !moved || progress_.idle();
        add_reasons(segment_.slot(rank_), after);
        moved = progress_.pass(little);
        progress_.announce();
        return !moved || progress_.idle();
    } catch (const Failure& failure) {
        fail(failure.rank(), failure.what());
    } catch (const std::exception& error) {
        fail(rank_, "rank " + std::to_string(rank_) + ": " + error.what());
    }
    progress_.give_up();
    drop_issued();
    return true;
}

// Begins what was issued and moves what can be moved. The caller holds `moving_`.
bool Rank::advance(std::uint64_t most) {
    {
        const std::lock_guard lock(mutex_);
        if (failure_.empty()) taken_.swap(issued_);
    }
    for (auto& operation : taken_) progress_.begin(std::move(operation));
    taken_.clear();
    return progress_.pass(most);
}

Rank::Handle Rank::allreduce(Number number, std::byte* array, std::uint64_t count) {
    const std::uint64_t item = number == Number::float32 ? sizeof(float) : sizeof(double);
    const auto size = static_cast<std::uint64_t>(segment_.size());
    const std::uint64_t lines = (count + chunk_items - 1) / chunk_items;
    const auto begin = [&](int rank) {
        return std::min(count, lines * static_cast<std::uint64_t>(rank) / size * chunk_items) * item;
    };
    auto operation = std::make_shared<Operation>();
    const std::uint64_t own_length = begin(rank_ + 1) - begin(rank_);
    if (own_length != 0) {
        operation->sum = std::make_unique<Sum>(Sum{number, array + begin(rank_), own_length});
        operation->sends.push_back({rank_, array + begin(rank_), own_length, operation->sum.get()});
    }
    for (int peer = 0; peer < segment_.size(); ++peer) {
        if (peer == rank_) continue;
        if (own_length != 0) operation->receives.push_back({peer, nullptr, own_length, operation->sum.get()});
        const std::uint64_t length = begin(peer + 1) - begin(peer);
        if (length == 0) continue;
        operation->sends.push_back({peer, array + begin(peer), length});
        operation->receives.push_back({peer, array + begin(peer), length, nullptr, true});
    }
    return issue(std::move(operation));
}

Rank::Handle Rank::exchange(const std::vector<Part>& sends, const std::vector<Part>& receives) {
    auto operation = std::make_shared<Operation>();
    const std::byte* own = nullptr;
    for (const Part& part : sends) {
        if (part.length == 0) continue;
        if (part.peer == rank_)
            own = part.data;
        else
            operation->sends.push_back({part.peer, part.data, part.length});
    }
    for (const Part& part : receives) {
        if (part.length == 0) continue;
        if (part.peer == rank_)
            operation->own = Copy{own, part.data, part.length};
        else
            operation->receives.push_back({part.peer, part.data, part.length});
    }
    return issue(std::move(operation));
}

Rank::Handle Rank::allgather(const std::vector<Part>& parts) {
    auto operation = std::make_shared<Operation>();
    for (const Part& part : parts) {
        if (part.length == 0) continue;
        if (part.peer == rank_)
            operation->sends.push_back({part.peer, part.data, part.length});
        else
            operation->receives.push_back({part.peer, part.data, part.length, nullptr, true});
    }
    return issue(std::move(operation));
}

void Rank::run() {
    // A thread inherits how its creator rounds.
    std::fesetenv(FE_DFL_ENV);
    try {
        carry_out();
    } catch (const Failure& failure) {
        fail(failure.rank(), failure.what());
    } catch (const std::exception& error) {
        fail(rank_, "rank " + std::to_string(rank_) + ": " + error.what());
    }
    {
        const std::lock_guard lock(moving_);
        progress_.give_up();
    }
    drop_issued();
}

void Rank::carry_out() {
    Slot& slot = segment_.slot(rank_);
    while (!stopping_) {
        const std::uint32_t heard = slot.bell.load(std::memory_order_seq_cst);
        std::uint32_t reasons = 0;
        {
            const std::lock_guard lock(moving_);
            if (advance(~std::uint64_t{0})) continue;
            progress_.announce();
            if (!progress_.idle()) {
                check_peers(milliseconds());
                if (progress_.pass()) continue;
            }
            reasons = progress_.reasons_to_wake();
        }
        sleep_at_bell(slot, heard, reasons, check_milliseconds);
    }
}

void Rank::check_peers(std::int64_t now) {
    const bool look = now - checked_at_ >= check_milliseconds;
    if (look) checked_at_ = now;
    for (int peer = 0; peer < segment_.size(); ++peer) {
        if (peer == rank_) continue;
        const std::string who = "rank " + std::to_string(peer);
        const Slot& slot = segment_.slot(peer);
        const auto life = static_cast<Life>(slot.life.load(std::memory_order_acquire));
        if (life == Life::failed) {
            const auto named = slot.culprit.load(std::memory_order_relaxed);
            const bool known =
                named < static_cast<std::uint32_t>(segment_.size()) && static_cast<int>(named) != peer;
            const int culprit = known ? static_cast<int>(named) : peer;
            throw Failure(culprit, known ? who + " failed because of rank " + std::to_string(culprit)
                                         : who + " gave up");
        }
        const bool ended = look && !processes_[static_cast<std::size_t>(peer)].lives();
        if (life == Life::left && progress_.needs(peer) && !progress_.pass() && progress_.needs(peer))
            throw Failure(peer, who + " left before collective was complete");
        if (ended && life != Life::left) throw Failure(peer, who + " ended");
    }
}

}  // namespace gradcomp::shm
