#include "runtime/engine/marked_span.h"

#include <utility>

#include "forebay/stream_call.h"

namespace forebay {

void begin_span(Backend& backend, Timeline* timeline, Stream stream, const char* track) noexcept {
  if (timeline == nullptr) return;
  static_cast<void>(call_on(backend, stream, [timeline, track] { timeline->begin(track); }));
}

void end_span(Backend& backend, Timeline* timeline, Stream stream, const char* track,
              std::string name) noexcept {
  if (timeline == nullptr) return;
  static_cast<void>(
      call_on(backend, stream, [timeline, track, name = std::move(name)] { timeline->end(track, name); }));
}

MarkedSpan::MarkedSpan(Backend& backend, Timeline* timeline, Stream stream, const char* track,
                       std::string name)
    : backend_(backend), timeline_(timeline), stream_(stream), track_(track), name_(std::move(name)) {
  begin_span(backend_, timeline_, stream_, track_);
}

MarkedSpan::~MarkedSpan() {
  end_span(backend_, timeline_, stream_, track_, std::move(name_));
}

}  // namespace forebay
