# A formula for a tap: put it into Formula/, with url and sha256 of the release's sdist (its page on PyPI shows both).
class EagleMlx < Formula
  include Language::Python::Virtualenv

  desc "Lossless speculative decoding with draft heads on Apple's MLX"
  url "https://files.pythonhosted.org/packages/source/e/eagle-mlx/eagle_mlx-0.1.0.tar.gz"
  sha256 "FILL_IN"
  license "MIT"

  depends_on :macos
  depends_on "python@3.13"

  def install
    virtualenv_create(libexec, "python3.13", without_pip: false)
    system libexec/"bin/pip", "install", "#{buildpath}[all]"
    bin.install_symlink Dir[libexec/"bin/eagle-*"]
  end

  test do
    system bin/"eagle-generate", "--version"
  end
end
