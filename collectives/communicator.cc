#include "forebay/communicator.h"
