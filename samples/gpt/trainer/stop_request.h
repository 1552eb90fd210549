// The request to end a training early. It is one flag of the process, so that a signal handler can set it.
#pragma once

namespace forebay::gpt {

// Asks the running training to end after the current step, on all ranks. Returns has_begun_steps().
// Threads: any; safe in a signal handler.
bool request_stop() noexcept;
bool stop_is_requested() noexcept;
// Call it before the next training of this process.
void clear_stop() noexcept;

// Whether this process has begun a step. Steps look at the request; the setup before them does not.
// Threads: any; safe in a signal handler.
bool has_begun_steps() noexcept;
void note_step_begins() noexcept;

}  // namespace forebay::gpt
