"""A call from the public function to the launch: known, recorded, watched, compiled."""
