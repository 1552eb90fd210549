#include "forebay/host_clock.h"
