#include "marked_span.h"

#include <utility>

#include "forebay/stream_call.h"

namespace forebay {

// What cannot be queued is left out: the stream's failure is told elsewhere.
MarkedSpan::MarkedSpan(Backend& backend, Timeline* timeline, Stream stream, const char* track,
                       std::string name)
    : backend_(backend), timeline_(timeline), stream_(stream), track_(track), name_(std::move(name)) {
  if (timeline_ == nullptr) return;
  static_cast<void>(call_on(backend_, stream_, [timeline, track] { timeline->begin(track); }));
}

MarkedSpan::~MarkedSpan() {
  if (timeline_ == nullptr) return;
  static_cast<void>(call_on(
      backend_, stream_,
      [timeline = timeline_, track = track_, name = std::move(name_)] { timeline->end(track, name); }));
}

}  // namespace forebay
