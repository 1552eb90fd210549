#include "forebay/arena.h"
