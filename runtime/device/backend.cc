#include "forebay/backend.h"
