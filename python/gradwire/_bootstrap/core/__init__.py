"""The core of a communicator, which takes over the sockets of a mesh, and of ways made anew."""
