// MarkedSpan: marks the work queued on a stream during its life as one span of a timeline, if there is one.
#pragma once

#include <string>

#include "forebay/backend.h"
#include "forebay/timeline.h"

namespace forebay {

// The same in two calls. Errors: none; a mark that cannot be queued is left out, because the stream's failure
// is reported elsewhere.
void begin_span(Backend& backend, Timeline* timeline, Stream stream, const char* track) noexcept;
void end_span(Backend& backend, Timeline* timeline, Stream stream, const char* track,
              const std::string& name) noexcept;

class MarkedSpan {
 public:
  // `timeline`: null marks nothing. Requires: `track` is a literal.
  MarkedSpan(Backend& backend, Timeline* timeline, Stream stream, const char* track, std::string name);
  ~MarkedSpan();
  MarkedSpan(const MarkedSpan&) = delete;
  MarkedSpan& operator=(const MarkedSpan&) = delete;

 private:
  Backend& backend_;
  Timeline* const timeline_;
  const Stream stream_;
  const char* const track_;
  std::string name_;
};

}  // namespace forebay
