#include "runtime/engine/marked_span.h"

#include <utility>

namespace forebay {

void begin_span(Backend& backend, Timeline* timeline, Stream stream, const char* track) noexcept {
  if (timeline != nullptr) timeline->begin(track, backend, stream);
}

void end_span(Backend& backend, Timeline* timeline, Stream stream, const char* track,
              const std::string& name) noexcept {
  if (timeline != nullptr) timeline->end(track, name, backend, stream);
}

MarkedSpan::MarkedSpan(Backend& backend, Timeline* timeline, Stream stream, const char* track,
                       std::string name)
    : backend_(backend), timeline_(timeline), stream_(stream), track_(track), name_(std::move(name)) {
  begin_span(backend_, timeline_, stream_, track_);
}

MarkedSpan::~MarkedSpan() {
  end_span(backend_, timeline_, stream_, track_, name_);
}

}  // namespace forebay
