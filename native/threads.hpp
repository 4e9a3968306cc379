// The threads that share a kernel's work with its caller.
//
// They start with the first call that needs them, then wait in a condition variable for the next one, and end
// with the process. A forked child starts threads of its own. Callers may be several threads at a time: each
// does its own work, and threads help one caller after the other.
#pragma once

#include <cstdint>
#include <functional>

namespace gradcomp {

// Most threads of a call, its caller included. 1 until it is set: then none is ever started.
int threads();

// Throw std::invalid_argument for a number that is not positive.
void set_threads(int number);

// Call task(0) .. task(count - 1), each once, by up to `most` threads, the caller included; return when all
// calls have returned, and throw what the first of them threw. Throw std::runtime_error if the system starts
// no thread.
void run_on_threads(std::int64_t count, int most, const std::function<void(std::int64_t)>& task);

}  // namespace gradcomp
