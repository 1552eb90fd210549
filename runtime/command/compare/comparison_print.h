// Prints comparisons of settings: text for people, CSV and JSON for programs, and a page with a plot.
#pragma once

#include <string>

#include "runtime/command/compare/comparison.h"

namespace forebay {

struct ComparisonText {
  std::string model;  // In words.
  Objective objective = Objective::kTime;
  double price = 0;  // A device for an hour; 0: not given.
};

std::string comparison_text(const Comparison& comparison, const ComparisonText& text);
// All settings, in the order of the choices; those that do not fit have no times.
std::string comparison_csv(const Comparison& comparison, const ComparisonText& text);
std::string comparison_json(const Comparison& comparison, const ComparisonText& text);
// One HTML file that needs no script, no network and no other file.
std::string comparison_page(const Comparison& comparison, const ComparisonText& text);

}  // namespace forebay
