#include "threads.hpp"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

namespace gradcomp {

namespace {

std::atomic<int> most_threads = 1;

// The work of one caller.
class Job {
  public:
    Job(std::int64_t count, int helpers, const std::function<void(std::int64_t)>& task)
        : wanted(helpers), count_(count), task_(task) {}

    // What nobody else has begun.
    void work() {
        try {
            for (std::int64_t i = next_++; i < count_; i = next_++) task_(i);
        } catch (...) {
            next_ = count_;
            const std::lock_guard lock(mutex_);
            if (!error_) error_ = std::current_exception();
        }
    }

    // Once all have left.
    void rethrow() const {
        if (error_) std::rethrow_exception(error_);
    }

    // Changed under the pool's mutex: threads that may still join, and those that have joined and not left.
    int wanted;
    std::atomic<int> working = 0;
    std::condition_variable left;

  private:
    std::int64_t count_;
    const std::function<void(std::int64_t)>& task_;
    std::atomic<std::int64_t> next_ = 0;
    std::mutex mutex_;
    std::exception_ptr error_;
};

class Pool {
  public:
    void run(Job& job) {
        const int helpers = job.wanted;
        {
            const std::lock_guard lock(mutex_);
            while (started_ < helpers) start();
            jobs_.push_back(&job);
        }
        for (int i = 0; i < helpers; ++i) came_.notify_one();
        job.work();
        std::unique_lock lock(mutex_);
        std::erase(jobs_, &job);
        lock.unlock();
        // Others end their last share soon; being woken takes longer.
        const auto until = std::chrono::steady_clock::now() + longest_yielding;
        while (job.working != 0 && std::chrono::steady_clock::now() < until) std::this_thread::yield();
        lock.lock();
        job.left.wait(lock, [&] { return job.working == 0; });
    }

  private:
    static constexpr std::chrono::microseconds longest_yielding{50};

    void start() {
        // Signals are for Python's main thread.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            std::thread(&Pool::help, this).detach();
        } catch (const std::system_error& error) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            throw std::runtime_error("cannot start a thread for the kernels: " + std::string(error.what()) +
                                     "; GRADCOMP_THREADS=1 needs none");
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        ++started_;
    }

    [[noreturn]] void help() {
        std::fesetenv(FE_DFL_ENV);  // else it would be that of the thread which started this one
        std::unique_lock lock(mutex_);
        for (;;) {
            came_.wait(lock, [&] { return !jobs_.empty(); });
            Job& job = *jobs_.front();
            if (--job.wanted == 0) jobs_.pop_front();
            ++job.working;
            lock.unlock();
            job.work();
            lock.lock();
            // The caller cannot go on, and end the job, before the mutex is free.
            if (--job.working == 0) job.left.notify_one();
        }
    }

    std::mutex mutex_;
    std::condition_variable came_;
    std::deque<Job*> jobs_;
    int started_ = 0;
};

// Never destroyed: its threads wait in it until the process has ended.
std::atomic<Pool*> current_pool = nullptr;

// A forked child has none of the threads, and perhaps a locked mutex: it makes a pool of its own.
const int unregistered = pthread_atfork(nullptr, nullptr, [] { current_pool = nullptr; });

Pool& pool() {
    if (unregistered != 0) throw std::bad_alloc();
    Pool* found = current_pool;
    if (found != nullptr) return *found;
    auto* const made = new Pool;
    if (current_pool.compare_exchange_strong(found, made)) return *made;
    delete made;
    return *found;
}

}  // namespace

int threads() {
    return most_threads;
}

void set_threads(int number) {
    if (number < 1) throw std::invalid_argument("threads must be positive, got " + std::to_string(number));
    most_threads = number;
}

void run_on_threads(std::int64_t count, int most, const std::function<void(std::int64_t)>& task) {
    const int helpers = static_cast<int>(count < most ? count : most) - 1;
    Job job(count, helpers < 0 ? 0 : helpers, task);
    if (helpers > 0)
        pool().run(job);
    else
        job.work();
    job.rethrow();
}

}  // namespace gradcomp
